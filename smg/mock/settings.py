"""What a simulator can be told: one table that the command line, `Simulator` and `spawn` all read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from dataclasses import dataclass
from typing import Any

BACKENDS = ("tokenspeed", "vllm")
HANDSHAKE_STEPS = ("hello", "ready", "registration")


def _option(default: Any, text: str, **how: Any) -> Any:
    """A field that is also a command-line option; `how` goes to argparse."""
    return dataclasses.field(default=default, metadata={"help": text, **how})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one simulator process. A duration or rate of 0 means instantly.

    Options that may be given several times on the command line are tuples here. Raises ValueError for a
    value that makes no sense, naming the option.
    """

    # Where to dial, and as whom.
    worker_url: str = _option("", "the group's worker URL; its path gives the handshake port", metavar="ipc://PATH")
    handshake_address: str | None = _option(
        None, "dial this handshake address instead of the one derived from the URL", metavar="tcp://HOST:PORT"
    )
    backend: str = _option("tokenspeed", "whose wire to speak", choices=BACKENDS)
    ranks: int = _option(1, "ranks in this process", type=int, metavar="N")
    start_index: int = _option(
        0,
        "engine index of the first rank; with --ranks 1 every rank can be its own process",
        type=int,
        metavar="I",
    )
    data_parallel_size: int | None = _option(
        None,
        "size of the whole group as the ranks register it (default: start index + ranks)",
        type=int,
        metavar="N",
    )
    vllm_version: str = _option("0.32.0", "vLLM: the version that the ranks register, and speak", metavar="VERSION")
    lockstep: bool = _option(
        False, "vLLM: the ranks make every step together, as those of an MoE model", action="store_true"
    )
    handshake_timeout: float = _option(
        600.0, "give up when no INIT came after this long", type=float, metavar="SECONDS"
    )

    # How fast the engine is and how much it holds.
    step_ms: float = _option(10.0, "duration of a decode step; 0: as fast as it goes", type=float, metavar="MS")
    decode_per_req_ms: float = _option(
        0.0, "added to a step for each request that decodes in it", type=float, metavar="MS"
    )
    prefill_tps: float = _option(0.0, "prompt tokens per second; 0: instantly", type=float, metavar="N")
    prefill_chunk: int = _option(8192, "prompt tokens one step takes in, over all requests", type=int, metavar="N")
    tokens_per_step: int = _option(
        1, "tokens each decoding request gains per step, as with speculative decoding", type=int, metavar="N"
    )
    max_running: int = _option(256, "requests admitted at once; the others wait, first come first served", type=int)
    kv_pages: int = _option(20480, "KV cache pages", type=int, metavar="N")
    page_size: int = _option(64, "tokens per KV page", type=int, metavar="N")
    max_model_len: int = _option(131072, "context length in tokens", type=int, metavar="N")
    cached_tokens: int = _option(
        0,
        "prompt tokens each request finds in the prefix cache (at most its prompt - 1)",
        type=int,
        metavar="N",
    )

    # What it answers.
    seed: int = _option(0, "replies follow from this and the request's own seed", type=int)
    model_path: str | None = _option(
        None, "directory with a tokenizer.json: replies are English text in its tokens", metavar="DIR"
    )
    vocab_size: int = _option(
        32000, "without --model-path, replies are arbitrary ids below this", type=int, metavar="N"
    )
    eos_token_id: int | None = _option(
        None,
        "last id of a reply that ends by itself (default: the model's, else vocabulary size - 1)",
        type=int,
    )
    output_tokens: str | None = _option(
        None,
        "length of a reply that ends by itself (finish reason stop), e.g. 200, or 20-400 for lengths drawn "
        "from the seed (default: every reply goes on to its max_new_tokens)",
        metavar="N|MIN-MAX",
    )
    enable_output_logprobs: bool = _option(
        False,
        "TokenSpeed: serve logprobs; without it a request for them is refused, as by the engine",
        action="store_true",
    )
    grammar_backend: bool = _option(
        False,
        "TokenSpeed: accept json_schema, regex, ebnf and structural_tag (the text does not obey them, nor vLLM's)",
        action="store_true",
    )

    # How it looks on the wire.
    slim_elements: int = _option(
        14,
        "TokenSpeed: elements of an output frame: 14 as 0.1.1, 10 with engine index only, 9 older",
        type=int,
        choices=(9, 10, 14),
    )
    registration: str | None = _option(
        None, "JSON object laid over the registration map; null removes a key", metavar="JSON"
    )
    max_loras: int = _option(0, "vLLM: LoRA adapters in one batch; 0: the engine has none", type=int, metavar="N")
    input_hwm: int | None = _option(
        None,
        "receive high-water mark of the input socket (default: the engine's)",
        type=int,
        metavar="N",
    )
    no_sentinel: bool = _option(
        False, "do not send ENGINE_CORE_DEAD when ending, as TokenSpeed's close() does", action="store_true"
    )

    # Faults and control.
    withhold: tuple[str, ...] = _option(
        (), "leave out this handshake step until told to proceed", choices=HANDSHAKE_STEPS, action="append"
    )
    hold: bool = _option(False, "take requests but make no step until told to", action="store_true")
    fault: tuple[str, ...] = _option(
        (),
        "an operation to run once its rank is live, e.g. 'die rank=1 after_frames=20' (see the list below)",
        action="append",
        metavar="'OP KEY=VALUE...'",
    )
    record: bool = _option(
        False, "keep decoded requests and report each ADD, ABORT and finish (costs time)", action="store_true"
    )
    control: bool = _option(
        False,
        "take operations as JSON lines on stdin and report on stdout; end when stdin closes",
        action="store_true",
    )

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{flag(name)} {value}: must be at least {least}")
        if self.backend not in BACKENDS:
            raise ValueError(f"--backend {self.backend}: must be one of {', '.join(BACKENDS)}")
        if self.slim_elements not in (9, 10, 14):
            raise ValueError(f"--slim-elements {self.slim_elements}: must be 9, 10 or 14")
        if self.start_index + self.ranks > 65536:
            raise ValueError(f"--start-index {self.start_index}: an engine index must be below 65536")
        if self.lockstep and (self.backend != "vllm" or self.group_size < 2 or self.group_size != self.ranks):
            raise ValueError("--lockstep: needs --backend vllm, and the two or more ranks of a group in this process")
        for step in self.withhold:
            if step not in HANDSHAKE_STEPS:
                raise ValueError(f"--withhold {step}: must be one of {', '.join(HANDSHAKE_STEPS)}")
        _ = (
            self.reply_lengths,
            self.registration_overrides,
            self.faults,
        )  # each raises for what it cannot read

    @property
    def reply_lengths(self) -> tuple[int, int] | None:
        """Bounds (included) of the drawn reply length in tokens; None: replies do not end by themselves."""
        if self.output_tokens is None:
            return None
        low, _, high = self.output_tokens.partition("-")
        try:
            bounds = int(low), int(high or low)
        except ValueError:
            bounds = (0, 0)
        if not 1 <= bounds[0] <= bounds[1]:
            raise ValueError(f"--output-tokens {self.output_tokens!r}: must be N or MIN-MAX, at least 1")
        return bounds

    @property
    def registration_overrides(self) -> dict[str, Any]:
        if self.registration is None:
            return {}
        try:
            overrides = json.loads(self.registration)
        except json.JSONDecodeError as error:
            raise ValueError(f"--registration: not JSON: {error}") from None
        if not isinstance(overrides, dict):
            raise ValueError("--registration: must be a JSON object")
        return overrides

    @property
    def faults(self) -> list[dict[str, Any]]:
        """The --fault options as control messages."""
        return [_fault_message(text) for text in self.fault]

    @property
    def group_size(self) -> int:
        return self.data_parallel_size or self.start_index + self.ranks

    def to_argv(self) -> list[str]:
        """These settings as command-line arguments; what has its default is left out."""
        argv: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if value is True:
                argv.append(flag(field.name))
            else:
                for item in value if isinstance(value, tuple) else (value,):
                    argv.append(f"{flag(field.name)}={item}")
        return argv

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Settings:
        values: dict[str, Any] = {field.name: getattr(args, field.name) for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        return cls(**values)


_LEAST = {
    "ranks": 1, "start_index": 0, "handshake_timeout": 0,
    "step_ms": 0, "decode_per_req_ms": 0, "prefill_tps": 0, "prefill_chunk": 1, "tokens_per_step": 1,
    "max_running": 1, "kv_pages": 1, "page_size": 1, "max_model_len": 3, "cached_tokens": 0,
    "vocab_size": 2, "max_loras": 0, "input_hwm": 0,
}  # fmt: skip


_LISTS = ("token_ids", "frames")  # keys of operations that take comma-separated values


def flag(name: str) -> str:
    """The command-line spelling of a setting."""
    return "--" + name.replace("_", "-")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Give the parser one option per setting."""
    for field in dataclasses.fields(Settings):
        how = dict(field.metadata)
        text = how.pop("help")
        default = field.default
        if "(default" not in text and default not in (None, "", False, ()):
            text += " (default: %(default)s)"
        if how.get("action") == "append":
            default = []
        parser.add_argument(flag(field.name), default=default, help=text, required=field.name == "worker_url", **how)


def _fault_message(text: str) -> dict[str, Any]:
    words = shlex.split(text)
    if not words:
        raise ValueError("--fault: must name an operation")
    message: dict[str, Any] = {"op": words[0]}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"--fault {text!r}: {word!r} must be KEY=VALUE")
        message[key] = [_plain(item) for item in value.split(",")] if key in _LISTS else _plain(value)
    return message


def _plain(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text
