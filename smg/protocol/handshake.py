"""The handshake that every engine speaks: HELLO, INIT, READY and the registration.

All four are msgpack maps with named keys. An engine sends HELLO and READY on the handshake socket, takes INIT
there, and registers on its input socket; READY and registration come in either order. Readers here take what
they need by name: unknown keys are ignored, missing and nil ones take their defaults, and a value of a wrong
type is a `HandshakeError` that names the key. The engine's side is for simulators and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from smg.errors import HandshakeError

HELLO = "HELLO"
READY = "READY"
ENGINE_DEAD = b"ENGINE_CORE_DEAD"  # a whole output message, not msgpack: the engine is gone

LONGEST_MESSAGE = 1 << 20  # bytes; the largest real one, SGLang's registration, has about ten thousand
LONGEST_CONTAINER = 4096  # entries; with the unpacker's depth limit this bounds what a hostile dialer allocates


def identity(index: int) -> bytes:
    """The ZMQ routing id of an engine: its index (0..65535) as two bytes, little-endian."""
    if not 0 <= index <= 0xFFFF:
        raise ValueError(f"engine index {index} is not in 0..65535")
    return index.to_bytes(2, "little")


def index(identity: bytes) -> int | None:
    """The engine index that a ZMQ routing id stands for; None when it is not two bytes long."""
    return int.from_bytes(identity, "little") if len(identity) == 2 else None


@dataclass(frozen=True, slots=True)
class Status:
    """HELLO or READY."""

    status: str
    local: bool = False
    headless: bool = False
    parallel_config_hash: str | None = None


@dataclass(frozen=True, slots=True)
class Init:
    """The answer to HELLO: where the engine connects its data sockets."""

    inputs: list[str]
    outputs: list[str]
    parallel_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What an engine says about itself. Zero and None mean that it did not say."""

    vllm_version: str = ""  # "tokenspeed-0.1.1", "sglang-0.5.23", or vLLM's own "0.32.0"
    max_model_len: int = 0  # tokens, prompt and completion together
    num_gpu_blocks: int = 0
    block_size: int = 0  # tokens per KV page; `prefix_granularity` on the wire of newer TokenSpeed
    dp_stats_address: str | None = None
    dtype: str = "bfloat16"
    multimodal_encoder_dtype: str | None = None
    world_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0  # older TokenSpeed may say -1
    instance_id: str = ""  # served model's name or path
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: dict[str, Any] | None = None
    positional_layouts: dict[str, list[str]] | None = None  # SGLang: class -> field names after the tag

    @property
    def family(self) -> str | None:
        """ "tokenspeed", "sglang" or "vllm"; None when the engine did not say its version."""
        for name in ("tokenspeed", "sglang"):
            if self.vllm_version.startswith(f"{name}-"):
                return name
        return "vllm" if self.vllm_version else None

    @property
    def lockstep(self) -> bool:
        """Whether the rank steps together with the group's others, as those of vLLM do for a model with experts.

        Independent ranks of vLLM say 1, whatever it was started with; others' sizes tell nothing about this.
        """
        return self.family == "vllm" and self.data_parallel_size > 1

    @property
    def version(self) -> str:
        """The engine's version without the family."""
        return self.vllm_version.removeprefix(f"{self.family}-")


class Kind(NamedTuple):
    """What a key's value may be."""

    text: str
    accepts: Callable[[Any], bool]


COUNT = Kind("an integer of 0 or more", lambda value: type(value) is int and value >= 0)
INTEGER = Kind("an integer", lambda value: type(value) is int)
NUMBER = Kind("a number", lambda value: type(value) in (int, float))
FLAG = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("text", lambda value: type(value) is str)
TEXTS = Kind("an array of text", lambda value: type(value) is list and all(type(item) is str for item in value))
MAP = Kind("a map", lambda value: type(value) is dict)
LAYOUTS = Kind(
    "a map of arrays of text",
    lambda value: type(value) is dict and all(TEXT.accepts(k) and TEXTS.accepts(v) for k, v in value.items()),
)

# The layouts: key on the wire -> what it may hold. Nil stands for the default everywhere.
STATUS_KEYS = {"status": TEXT, "local": FLAG, "headless": FLAG, "parallel_config_hash": TEXT}
INIT_KEYS = {"addresses": MAP, "parallel_config": MAP}
ADDRESS_KEYS = {
    "inputs": TEXTS,
    "outputs": TEXTS,
    "coordinator_input": TEXT,
    "coordinator_output": TEXT,
    "frontend_stats_publish_address": TEXT,
}
REGISTRATION_KEYS = {
    "max_model_len": COUNT,
    "num_gpu_blocks": COUNT,
    "block_size": COUNT,
    "prefix_granularity": COUNT,
    "dp_stats_address": TEXT,
    "dtype": TEXT,
    "multimodal_encoder_dtype": TEXT,
    "vllm_version": TEXT,
    "world_size": COUNT,
    "data_parallel_size": COUNT,
    "tensor_parallel_size": COUNT,
    "pipeline_parallel_size": COUNT,
    "decode_context_parallel_size": COUNT,
    "data_parallel_rank": COUNT,
    "max_num_seqs": COUNT,
    "max_num_batched_tokens": INTEGER,
    "instance_id": TEXT,
    "kv_cache_size_tokens": COUNT,
    "kv_cache_max_concurrency": NUMBER,
    "kv_events_config": MAP,
    "positional_layouts": LAYOUTS,
}
ALIASES = {"prefix_granularity": "block_size"}  # key on the wire -> field of Registration

# The keys an engine sends, in its order. TokenSpeed renamed block_size on 2026-08-14.
_TOKENSPEED = tuple(key for key in REGISTRATION_KEYS if key != "positional_layouts")
TOKENSPEED_REGISTRATION = tuple(key for key in _TOKENSPEED if key != "block_size")
TOKENSPEED_REGISTRATION_BEFORE_RENAME = tuple(
    key for key in _TOKENSPEED if key not in ("prefix_granularity", "multimodal_encoder_dtype")
)
SGLANG_REGISTRATION = tuple(key for key in REGISTRATION_KEYS if key != "prefix_granularity")


# Router's side


def decode_status(frame: bytes) -> Status:
    """HELLO or READY; any other status is the caller's to judge. Raises `HandshakeError`."""
    values = _read(frame, "handshake message", STATUS_KEYS)
    if "status" not in values:
        raise HandshakeError("handshake message has no status")
    return Status(**values)


def encode_init(
    inputs: Sequence[str], outputs: Sequence[str], parallel_config: Mapping[str, Any] | None = None
) -> bytes:
    """INIT: the addresses to connect to, one input and one output per frontend.

    An engine of a dense model must get an empty `parallel_config`: vLLM sets every key of it on its own.
    """
    addresses = {"inputs": list(inputs), "outputs": list(outputs)}
    nil = {key: None for key in ADDRESS_KEYS if key not in addresses}
    return _pack({"addresses": {**addresses, **nil}, "parallel_config": dict(parallel_config or {})})


def decode_registration(payload: bytes) -> Registration:
    """An engine's registration. Raises `HandshakeError`."""
    if not payload:
        raise HandshakeError(
            "registration is empty: this is a vLLM older than about 0.20, whose version cannot be told"
        )
    values = _read(payload, "registration", REGISTRATION_KEYS)
    return Registration(**{ALIASES.get(key, key): value for key, value in values.items()})


# Engine's side


def encode_status(status: str, *, local: bool = True, headless: bool = True, **more: Any) -> bytes:
    """HELLO or READY. TokenSpeed and SGLang also send `parallel_config_hash=None`; vLLM is not `local`."""
    return _pack({"status": status, "local": local, "headless": headless, **more})


def decode_init(frame: bytes) -> Init:
    """INIT as an engine reads it. Raises `HandshakeError`."""
    values = _read(frame, "INIT", INIT_KEYS)
    addresses = _check(values.get("addresses", {}), "INIT", ADDRESS_KEYS)
    for key in ("inputs", "outputs"):
        if not addresses.get(key):
            raise HandshakeError(f"INIT has no {key}")
    return Init(addresses["inputs"], addresses["outputs"], values.get("parallel_config", {}))


def encode_registration(registration: Registration, keys: Sequence[str] = TOKENSPEED_REGISTRATION) -> bytes:
    """A registration with these keys, in this order."""
    return _pack({key: getattr(registration, ALIASES.get(key, key)) for key in keys})


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _read(frame: bytes, what: str, keys: Mapping[str, Kind]) -> dict[str, Any]:
    if len(frame) > LONGEST_MESSAGE:
        raise HandshakeError(f"{what} has {len(frame)} bytes, more than {LONGEST_MESSAGE}")
    try:
        value = msgpack.unpackb(
            frame, strict_map_key=False, max_array_len=LONGEST_CONTAINER, max_map_len=LONGEST_CONTAINER
        )
    except Exception as error:  # ValueErrors of several kinds, and TypeError for a map key that cannot be one
        raise HandshakeError(f"{what} is not msgpack: {str(error) or type(error).__name__}") from None
    if type(value) is not dict:
        raise HandshakeError(f"{what} must be a map, is {type(value).__name__}")
    return _check(value, what, keys)


def _check(value: Mapping[Any, Any], what: str, keys: Mapping[str, Kind]) -> dict[str, Any]:
    """The known keys that hold something, each of its kind."""
    known = {key: value[key] for key in keys if value.get(key) is not None}
    for key, item in known.items():
        if not keys[key].accepts(item):
            raise HandshakeError(f"{what}: {key} must be {keys[key].text}, is {repr(item)[:80]}")
    return known
