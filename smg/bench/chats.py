"""Chat requests, all different, and the client in C that sends them (native/client.c) to a gateway on this machine."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smg.bench import native
from smg.bench.accounting import keep_aside

PIECE = 4  # bytes of text per token that the simulator makes: a space and three letters


def piece_ids(model: Path) -> list[int]:
    """Token ids whose text is a space and three letters, so that text tells tokens exactly."""
    vocabulary: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    found = [index for text, index in vocabulary.items() if re.fullmatch("[Ġ▁][a-z]{3}", text)]
    if len(found) < 16:
        raise SystemExit(f"{model}: fewer than 16 tokens are a space and three letters")
    return found[:256]


class Words:
    """Text like prose to a tokenizer: common words often, rare ones rarely, some never seen before."""

    def __init__(self, model: Path, seed: int = 1) -> None:
        vocabulary: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        self._words = [text[1:] for text in vocabulary if re.fullmatch("[Ġ▁][A-Za-z]+", text)]
        self._weights = [1 / (10 + i) for i in range(len(self._words))]
        self._random = random.Random(seed)

    def text(self, size: int) -> str:
        """About `size` characters."""
        chosen = self._random.choices(self._words, self._weights, k=size // 4 + 2)
        for at in range(7, len(chosen), 12):
            letters = self._random.choices("abcdefghijklmnoprstuvw", k=self._random.randint(4, 11))
            chosen[at] = "".join(letters) + self._random.choice((",", ".", "", "ing", "ed"))
        return " ".join(chosen)[:size].strip()


@dataclass(frozen=True)
class Bodies:
    """A file of HTTP requests in the client's format; it is there as long as this object is."""

    file: Any
    count: int

    @classmethod
    def of_chats(cls, words: Words, model: str, *, count: int, size: int, tokens: int, stream: bool) -> Bodies:
        """Chats of one user message of `size` characters. `seed` is the request's number, for its stamps."""
        file = tempfile.NamedTemporaryFile(prefix="smg-bodies-")  # noqa: SIM115  lives as long as the object
        for seed in range(count):
            body = json.dumps(
                {
                    "model": model,
                    "messages": [{"role": "user", "content": words.text(size)}],
                    "max_tokens": tokens,
                    "seed": seed,
                    "stream": stream,
                }
            ).encode()
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            ).encode()
            file.write(struct.pack("<I", len(head) + len(body)) + head + body)
        file.flush()
        return cls(file, count)


class Client:
    """A load client that has connected and waits for `start`."""

    def __init__(
        self,
        port: int,
        bodies: Bodies,
        *,
        connections: int,
        count: int = 0,
        stamps: tuple[str, int] | None = None,
        rate: float = 0.0,
        ramp_ms: float = 0.0,
        limit: float = 60.0,
    ) -> None:
        path, columns = stamps or ("-", 2)
        arguments = (
            port,
            connections,
            bodies.file.name,
            count or bodies.count,
            PIECE,
            path,
            columns,
            rate,
            ramp_ms,
            limit,
        )
        self._process = subprocess.Popen(
            [str(native.build("client")), *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise SystemExit(f"the load client ended with status {self._process.wait()}")
        keep_aside(self._process.pid)

    def start(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Waits for the end of the run. `ttft`, `gap`, `delay`, `whole`: p50, p90, p99, p99.9 in ms."""
        output, _ = self._process.communicate()
        result: dict[str, Any] = json.loads(output)
        return result
