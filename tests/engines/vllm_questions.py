"""What is asked of vLLM twice: through its own OpenAI server, and through the router."""

from __future__ import annotations

import json
import math
import urllib.request
from dataclasses import asdict, dataclass
from typing import Any

from vllm_driver import Server

import smg

PROMPT = [8185, 100, 200, 300, 400]
EOS, SECOND_EOS = 8188, 8186  # of the tiny models
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 1, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["left", "right"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}

# Fields of SamplingParams, which are OpenAI's names too; the prompt is PROMPT.
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "logprobs": GREEDY | {"logprobs": 3},
    "sampled token's logprob": SAMPLED | {"logprobs": 0, "seed": 3},
    "seed": SAMPLED | {"seed": 11},
    "another seed": SAMPLED | {"seed": 12},
    "top_k, top_p, min_p": SAMPLED | {"seed": 11, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": GREEDY
    | {"max_tokens": 120, "frequency_penalty": 1.9, "presence_penalty": 1.5, "repetition_penalty": 1.5},
    "logit_bias": GREEDY | {"logit_bias": {77: 3.5, 3269: -100.0}},
    "EOS": {"max_tokens": 24, "temperature": 0, "logit_bias": {EOS: 100.0}},
    "second EOS": {"max_tokens": 24, "temperature": 0, "logit_bias": {SECOND_EOS: 100.0}},
    "EOS ignored": GREEDY | {"logit_bias": {EOS: 100.0}},
    "EOS held back": {"max_tokens": 24, "min_tokens": 7, "temperature": 0, "logit_bias": {EOS: 100.0}},
    "regex": {"max_tokens": 60, "temperature": 0, "regex": "[0-9]{3}-[a-c]{2}"},
    "json_schema": {"max_tokens": 60, "temperature": 0, "json_schema": json.dumps(SCHEMA)},
}
MESSAGES = [{"role": "user", "content": "How many requests are running?"}]
# Whole bodies that go to both servers as they are
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (TEXT, GREEDY | {"prompt": "The router sends each request"}),
    "text with logprobs": (TEXT, GREEDY | {"prompt": "Every rank says hello once", "logprobs": 2}),
    "text of token ids": (TEXT, GREEDY | {"prompt": PROMPT}),
    "text twice": (TEXT, SAMPLED | {"prompt": PROMPT, "n": 2, "seed": 5}),
    "chat": (CHAT, GREEDY | {"messages": MESSAGES}),
    "chat with logprobs": (CHAT, GREEDY | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
    "chat that samples": (CHAT, SAMPLED | {"messages": MESSAGES, "seed": 5, "top_p": 0.95}),
    "chat with a schema": (
        CHAT,
        {
            "messages": MESSAGES,
            "max_tokens": 60,
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
}


@dataclass(frozen=True)
class Told:
    """One completion: what is the same whoever asked for it."""

    tokens: list[int]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[float] | None
    top: list[list[float]] | None  # of each token's likeliest, the likeliest first

    def unlike(self, other: Told) -> str:
        """How they differ; logprobs may by rounding, where the same sums were added up in another order."""
        return difference(asdict(self), asdict(other))


def difference(ours: Any, theirs: Any, where: str = "") -> str:
    """Where two pieces of JSON differ by more than the rounding of numbers, and how; "" = nowhere."""
    if isinstance(ours, float) and isinstance(theirs, float):
        same = math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-4)
        return "" if same else f"{where}: {ours!r} is not {theirs!r}"
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs: Any = ((f"{where}.{key}", ours[key], theirs[key]) for key in ours)
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(ours) == len(theirs):
        pairs = ((f"{where}[{at}]", *pair) for at, pair in enumerate(zip(ours, theirs, strict=True)))
    else:
        return "" if ours == theirs else f"{where}: {ours!r} is not {theirs!r}"
    return next(filter(None, (difference(one, other, place) for place, one, other in pairs)), "")


def told(outputs: list[smg.Output]) -> Told:
    """What came out of a stream."""
    last = outputs[-1]
    logprobs = [entry for out in outputs for entry in out.logprobs or ()]
    asked = any(out.logprobs is not None for out in outputs)
    return Told(
        [token for out in outputs for token in out.token_ids],
        last.finish_reason,
        last.stop_reason,
        [value for _, value, _ in logprobs] if asked else None,
        [[value for _, value in top] for _, _, top in logprobs] if asked else None,
    )


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def in_their_words(fields: dict[str, Any]) -> dict[str, Any]:
    """The body that asks vLLM's own server for what SamplingParams with these fields ask for."""
    body = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True, **fields}
    if "regex" in body:
        body["structured_outputs"] = {"regex": body.pop("regex")}
    if "json_schema" in body:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": json.loads(body.pop("json_schema"))},
        }
    return body


@dataclass(frozen=True)
class Reference:
    """What vLLM's own server answered."""

    told: dict[str, Told]
    answers: dict[str, Any]


def ask_reference(server: Server) -> Reference:
    """One question after the other, so that no batch has more than one request."""
    reference = Reference({}, {})
    for name, fields in FIELDS.items():
        answer = post(server.url + TEXT, in_their_words(fields))
        reference.answers[name] = answer
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        count = fields.get("logprobs")
        reference.told[name] = Told(
            choice["token_ids"],
            choice["finish_reason"],
            choice["stop_reason"],
            None if logprobs is None else logprobs["token_logprobs"],
            # The sampled token is among them, whether or not it is one of the likeliest.
            None
            if logprobs is None
            else [sorted(top.values(), reverse=True)[:count] for top in logprobs["top_logprobs"]],
        )
    for name, (path, body) in BODIES.items():
        reference.answers[name] = post(server.url + path, {"model": "tiny", **body})
    return reference
