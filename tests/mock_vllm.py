"""Messages to the simulator's vLLM dialect, and a dialect to take them."""

from __future__ import annotations

from typing import Any

import msgpack
from vllm_values import VOCAB_SIZE

from smg.mock.model import Engine
from smg.mock.replies import make_replies
from smg.mock.settings import Settings
from smg.mock.vllm import VLLM
from smg.protocol import vllm

REPLIES = make_replies(Settings(vocab_size=VOCAB_SIZE))
EOS = VOCAB_SIZE - 1
ADD, ABORT, WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
VERSION = "0.32.0"


def dialect_of(**options: Any) -> tuple[VLLM, Engine]:
    settings = Settings(**{"backend": "vllm", "vocab_size": VOCAB_SIZE, **options})
    engine = Engine(settings, make_replies(settings), VLLM.ending)
    return VLLM(settings, engine, settings.vocab_size), engine


def payload(version: str = VERSION, sampling: Any = None, **elements: Any) -> bytes:
    """An ADD that the engine takes, with some of its elements exchanged."""
    given = {"request_id": "a", "prompt_token_ids": [1, 2, 3], "arrival_time": 1.5, "sampling_params": sampling or {}}
    return vllm.encode_request({**given, **elements}, version)


def add(**elements: Any) -> list[bytes]:
    return [ADD, payload(**elements)]


def sampled(**sampling: Any) -> list[bytes]:
    return add(sampling=sampling)


def packed(kind: bytes, value: Any) -> list[bytes]:
    return [kind, msgpack.packb(value)]
