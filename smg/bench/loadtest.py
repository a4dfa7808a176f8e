"""A load client for OpenAI-compatible servers: streamed requests in a closed or an open loop, each one timed.

Closed: so many requests at once, the next when one has ended. Open: requests begin at the times of a Poisson process,
however many are under way; a client that cannot keep up with that tells by how late it began (`late`).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from smg.bench.accounting import percentile
from smg.bench.trace import Shape

_TEXT = (  # words of a token each, or nearly, to every tokenizer
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face level office door"
)
WORDS = _TEXT.split()


@dataclass(frozen=True)
class Target:
    """A server and how it is asked. `url` ends with the slash before `v1`."""

    url: str
    model: str
    chat: bool = True
    api_key: str | None = None
    ignore_eos: bool = False
    timeout: float = 300.0  # seconds for a request

    def request(self, prompt: str, tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.chat:
            return "v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
        return "v1/completions", {**body, "prompt": prompt}


@dataclass(slots=True)
class Sent:
    """What became of one request. Times in seconds from its beginning; `error` is None when it was answered whole."""

    begun: float
    late: float = 0.0
    texts: list[float] = field(default_factory=list)  # when each piece of text came
    ended: float = 0.0
    tokens: int = 0  # as the server counts them, else the pieces
    error: str | None = None
    said: str = ""  # what the server said of the error

    @property
    def ttft(self) -> float:
        return self.texts[0]

    @property
    def gaps(self) -> list[float]:
        """Between pieces of text: the inter-token latencies, where a piece is a token."""
        return [after - before for before, after in zip(self.texts, self.texts[1:], strict=False)]

    @property
    def per_token(self) -> float:
        """Seconds per token after the first."""
        return (self.texts[-1] - self.texts[0]) / max(1, self.tokens - 1)


@dataclass(frozen=True)
class Objective:
    """What counts as good: bounds in seconds on a request's TTFT, time per further token, and whole."""

    ttft: float | None = None
    per_token: float | None = None
    whole: float | None = None

    def met(self, sent: Sent) -> bool:
        if sent.error is not None or not sent.texts:
            return False
        reached = ((sent.ttft, self.ttft), (sent.per_token, self.per_token), (sent.ended, self.whole))
        return all(bound is None or value <= bound for value, bound in reached)

    def __str__(self) -> str:
        named = (("TTFT", self.ttft), ("further tokens on average", self.per_token), ("whole", self.whole))
        bounds = ", ".join(f"{name} ≤ {bound * 1e3:g} ms" for name, bound in named if bound is not None)
        return f"with {bounds}" if bounds else "that were answered"


@dataclass(frozen=True)
class Load:
    """How requests begin: `concurrency` at once, or `rate` a second; `count` of them; their lengths in tokens."""

    shape: Shape
    count: int
    concurrency: int | None = None
    rate: float | None = None

    def prompts(self, seed: int) -> Iterator[tuple[str, int]]:
        """(prompt, tokens to make), the same for the same seed."""
        chance = random.Random(seed)
        for _ in range(self.count):
            words = chance.choices(WORDS, k=self.shape.prompt.draw(chance))
            yield " ".join(words), self.shape.output.draw(chance)


@dataclass(frozen=True)
class Run:
    """A run's requests and how long it took, in seconds."""

    sent: Sequence[Sent]
    seconds: float

    @property
    def errors(self) -> Counter[str]:
        return Counter(sent.error for sent in self.sent if sent.error is not None)

    @property
    def complaint(self) -> str:
        """The errors by kind and what the server said of one; empty when all were answered."""
        kinds = ", ".join(f"{count} × {kind}" for kind, count in self.errors.most_common())
        said = next((sent.said for sent in self.sent if sent.said), "")
        return f"{kinds} ({said})" if said else kinds

    def figures(self, objective: Objective) -> dict[str, float]:
        """By name: percentiles in ms of requests that were answered, rates per second, shares."""
        good = [sent for sent in self.sent if sent.error is None and sent.texts]
        values = {
            "ttft": [sent.ttft for sent in good],
            "itl": [gap for sent in good for gap in sent.gaps],
            "e2e": [sent.ended for sent in good],
        }
        found = {
            f"{name}_{label}": percentile(of, share) * 1e3
            for name, of in values.items()
            for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
        }
        found["throughput"] = sum(sent.tokens for sent in good) / self.seconds
        met = sum(map(objective.met, self.sent))
        found["goodput"], found["good"] = met / self.seconds, 100 * met / len(self.sent)
        found["errors"] = float(sum(self.errors.values()))
        found["late_p99"] = percentile([sent.late for sent in self.sent], 0.99) * 1e3
        return found


async def run(target: Target, load: Load, seed: int) -> Run:
    """Send a load's requests to the server and wait for all of them."""
    prompts = list(load.prompts(seed))
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    timeout = aiohttp.ClientTimeout(total=target.timeout)
    async with aiohttp.ClientSession(target.url, connector=connector, headers=headers, timeout=timeout) as session:
        begin = time.perf_counter()
        if load.rate is None:
            left = iter(prompts)

            async def one_by_one() -> list[Sent]:
                return [await send(session, target, *prompt) for prompt in left]

            parts = await asyncio.gather(*(one_by_one() for _ in range(load.concurrency or 1)))
            sent = [each for part in parts for each in part]
        else:
            tasks = []
            async for late, prompt in _in_time(prompts, load.rate, seed):
                tasks.append(asyncio.create_task(send(session, target, *prompt, late=late)))
            sent = list(await asyncio.gather(*tasks))
        return Run(sent, time.perf_counter() - begin)


async def _in_time(
    prompts: Sequence[tuple[str, int]], rate: float, seed: int
) -> AsyncIterator[tuple[float, tuple[str, int]]]:
    """Each prompt at its time of a Poisson process, and how late that was."""
    chance = random.Random(seed + 1)
    loop = asyncio.get_running_loop()
    due = loop.time()
    for prompt in prompts:
        due += chance.expovariate(rate)
        if (wait := due - loop.time()) > 0:
            await asyncio.sleep(wait)
        yield max(0.0, loop.time() - due), prompt


async def send(session: aiohttp.ClientSession, target: Target, prompt: str, tokens: int, *, late: float = 0.0) -> Sent:
    """One request, to its end."""
    path, body = target.request(prompt, tokens)
    sent = Sent(time.perf_counter(), late)
    finished = False
    try:
        async with session.post(path, json=body) as response:
            if response.status != 200:
                sent.error, sent.said = f"HTTP {response.status}", _message(await response.text(errors="replace"))
            else:
                async for line in response.content:
                    finished = _take(sent, line) or finished
                if not finished and sent.error is None:
                    sent.error = "broken off"
    except asyncio.TimeoutError:
        sent.error = "timeout"
    except aiohttp.ClientConnectorError:
        sent.error = "connection refused"
    except (aiohttp.ClientError, ConnectionError):
        sent.error = "connection lost"
    except ValueError:
        sent.error = "not JSON, or a line too long"
    sent.ended = time.perf_counter() - sent.begun
    return sent


def _message(text: str) -> str:
    """The message of an error body, or its beginning where it is not OpenAI's."""
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        pass
    return " ".join(str(text).split())[:300]


def _take(sent: Sent, line: bytes) -> bool:
    """Read one line of the event stream. True for the last event."""
    if not line.startswith(b"data:"):
        return False
    data = line[5:].strip()
    if data == b"[DONE]":
        return True
    event = json.loads(data)
    if "error" in event:
        sent.error, sent.said = "error event", _message(data.decode())
        return False
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            sent.texts.append(time.perf_counter() - sent.begun)
            sent.tokens += 1
    if usage := event.get("usage"):
        sent.tokens = usage.get("completion_tokens", sent.tokens)
    return False


async def first_model(url: str, api_key: str | None) -> str:
    """The id of the first model that a server lists. Raises aiohttp.ClientError, LookupError, ValueError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with (
        aiohttp.ClientSession(url, headers=headers) as session,
        session.get("v1/models", raise_for_status=True) as response,
    ):
        models = (await response.json())["data"]
    return str(models[0]["id"])
