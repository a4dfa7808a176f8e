"""Responses with scripted outputs: the real text and event code on a connection that keeps what it is sent."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

from aiohttp import HttpVersion10, HttpVersion11
from multidict import CIMultiDict
from tokenizers import Tokenizer

import smg
from smg._text import TokenTable
from smg.http.completion import Completion
from smg.http.counts import Counts
from smg.http.exchange import Exchange
from smg.http.job import Decoding, Job
from smg.sampling import SamplingParams

MODEL = Path(smg.__file__).parent / "data" / "demo-model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
PATH = "/v1/test"
TABLE = TokenTable(TOKENIZER)
END = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"][0]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


class Transport:
    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> None:
        """Neither a socket nor TLS."""


class Client:
    """The far end of one connection."""

    def __init__(self, http11: bool = True) -> None:
        self.transport: Transport | None = Transport()
        self.writing_paused = False
        self.wire = None
        self.request = SimpleNamespace(
            protocol=self,
            transport=self.transport,
            version=HttpVersion11 if http11 else HttpVersion10,
            keep_alive=http11,
            headers=CIMultiDict(),
            method="POST",
        )
        self._sent = self.transport.writes

    @property
    def writes(self) -> list[bytes]:
        return self._sent

    def leave(self) -> None:
        self.transport = None
        if self.wire is not None:
            self.wire.leave()

    @property
    def head(self) -> bytes:
        return b"".join(self.writes).partition(b"\r\n\r\n")[0]

    @property
    def raw_body(self) -> bytes:
        return b"".join(self.writes).partition(b"\r\n\r\n")[2]

    @property
    def body(self) -> bytes:
        """The body without its chunked framing, which must be whole and correct."""
        rest, made, ended = self.raw_body, b"", False
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            assert re.fullmatch(rb"[0-9a-f]+", size)
            length = int(size, 16)
            assert rest[length : length + 2] == b"\r\n"
            made += rest[:length]
            rest = rest[length + 2 :]
            assert not ended, "a part follows the last chunk"
            ended = length == 0
        return made

    @property
    def complete(self) -> bool:
        return self.raw_body.endswith(b"0\r\n\r\n")


class Stream:
    def __init__(self, rank: int) -> None:
        self.rank, self.aborts, self.data = rank, 0, None

    def abort(self) -> None:
        self.aborts += 1


class Script:
    """One response to `job`. `say` gives a sequence tokens, as if the engine had."""

    def __init__(self, shape, job: Job, client: Client | None = None, **front) -> None:
        self.client = client or Client()
        self.streams: list[Stream] = []
        self.model = SimpleNamespace(table=TABLE, end_ids={END: None})
        self.front = SimpleNamespace(
            loop=asyncio.get_running_loop(),
            model=self.model,
            counts=Counts((PATH,)),
            active=set(),
            submit=self._submit,
            resubmit=lambda job, index, tried, since: None,
            **front,
        )
        self.exchange = Exchange(self.client.request, PATH)
        self.completion = Completion(self.front, job, shape(job, "id-1", 1700000000, self.model, None), self.exchange)
        self.completion.start()

    def _submit(self, job: Job, index: int, tried: list[tuple[object, int]]) -> Stream:
        self.streams.append(Stream(index % 2))
        tried.append((None, index % 2))
        return self.streams[-1]

    def say(self, text: str | list[int], finish: str | None = None, sequence: int = 0, **more) -> None:
        tokens = ids(text) if isinstance(text, str) else text
        self.completion.choices[sequence].feed(tokens, finish, **more)

    @property
    def body(self) -> bytes:
        return self.client.body

    @property
    def done(self) -> bool:
        return self.completion.done.done()


def job(prompt: str = "Hello", n: int = 1, **options) -> Job:
    of_decoding = {field.name for field in fields(Decoding)} & options.keys()
    decoding = {"params": SamplingParams(max_tokens=16), "stop_ids": {END: None}}
    decoding |= {name: options.pop(name) for name in of_decoding}
    options = {"decodings": [Decoding(**decoding)], "stream": True, **options}
    return Job(prompts=[ids(prompt)], n=n, model="m", **options)
