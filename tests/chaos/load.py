"""Consumers of every manners, embedded and over HTTP. Each submits, and checks how each of its requests ends."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable

import smg
from smg.mock.replies import Replies

PROMPT = list(range(3, 35))
CHAT = "/v1/chat/completions"


class Ledger:
    """How requests ended, by name, and what should not have been."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def put(self, outcome: str) -> None:
        with self.lock:
            self.outcomes[outcome] += 1

    def fault(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)


class Reader:
    """Checks one request's outputs: its own tokens in order, and nothing after its end."""

    def __init__(self, ledger: Ledger, replies: Replies, seed: int, wanted: int) -> None:
        self.ledger, self.wanted = ledger, wanted
        self.expected = replies.window(replies.start(seed), 0, wanted)
        self.tokens: list[int] = []
        self.finished: str | None = None

    def take(self, out: smg.Output) -> None:
        if self.finished is not None:
            self.ledger.fault(f"an output after {self.finished!r}")
        self.tokens += out.token_ids
        self.finished = out.finish_reason
        if self.tokens != self.expected[: len(self.tokens)]:
            self.ledger.fault(f"tokens {self.tokens} are not its own {self.expected}")

    def end(self) -> str:
        """The stream ended without an error."""
        if self.finished != "length" or len(self.tokens) != self.wanted:
            self.ledger.fault(f"ended as {self.finished!r} with {len(self.tokens)} of {self.wanted} tokens")
        return "finished"


class Embedded:
    """Applications that hold the group themselves."""

    def __init__(self, group: smg.EngineGroup, replies: Replies, ledger: Ledger, seed: int) -> None:
        self.group, self.replies, self.ledger = group, replies, ledger
        self.rng = random.Random(seed)
        self.stopping = False

    def _submit(self) -> tuple[smg.Stream, Reader] | None:
        seed, wanted = self.rng.randrange(2**31), self.rng.choice((1, 4, 16, 64))
        params = smg.SamplingParams(max_tokens=wanted, seed=seed)
        try:
            stream = self.group.submit(PROMPT, params, deadline=self.rng.choice((1.5, 3.0)))
        except smg.Error as error:
            self.ledger.put(f"refused {type(error).__name__}")
            return None
        return stream, Reader(self.ledger, self.replies, seed, wanted)

    async def run(self) -> None:
        """One task's requests, one after the other."""
        while not self.stopping:
            begun = self._submit()
            if begun is None:
                await asyncio.sleep(0.05)
                continue
            self.ledger.put(await self._consume(*begun))
            await asyncio.sleep(self.rng.random() * 0.05)

    async def _consume(self, stream: smg.Stream, reader: Reader) -> str:
        manner = self.rng.choice(("read", "read", "read", "break", "abort", "drop", "late"))
        if manner == "drop":
            return "dropped"
        if manner == "late":
            await asyncio.sleep(0.5)
        try:
            async for out in stream:
                reader.take(out)
                if manner == "break" and len(reader.tokens) >= reader.wanted // 2 and reader.finished is None:
                    return "left"
                if manner == "abort" and reader.finished is None:
                    stream.abort()
                    return "aborted"
        except smg.StreamError as error:
            return type(error).__name__
        return reader.end()

    def run_blocking(self) -> None:
        """The same from a thread without a loop."""
        while not self.stopping:
            begun = self._submit()
            if begun is None:
                threading.Event().wait(0.05)
                continue
            stream, reader = begun
            try:
                for out in stream.blocking(timeout=10):
                    reader.take(out)
            except smg.StreamError as error:
                self.ledger.put(type(error).__name__)
            else:
                self.ledger.put(reader.end())
            threading.Event().wait(self.rng.random() * 0.05)


class HttpClient:
    """Clients of the HTTP front, well-behaved or not."""

    def __init__(self, port: int, ledger: Ledger, seed: int) -> None:
        self.port, self.ledger = port, ledger
        self.rng = random.Random(seed)
        self.stopping = False

    def _request(self, stream: bool) -> bytes:
        body = {
            "messages": [{"role": "user", "content": f"Hello {self.rng.randrange(1000)}"}],
            "max_tokens": self.rng.choice((1, 8, 48)),
            "seed": self.rng.randrange(2**31),
            "stream": stream,
        }
        raw = json.dumps(body).encode()
        return f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw

    async def run(self) -> None:
        """One client's connections, one after the other."""
        manners: list[Callable[..., object]] = [self._whole, self._whole, self._stream, self._stream]
        manners += [self._reset, self._half, self._stall, self._pipeline]
        while not self.stopping:
            manner = self.rng.choice(manners)
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                await asyncio.wait_for(manner(reader, writer), 30)
            except TimeoutError:
                self.ledger.fault(f"{manner.__name__}: no end within 30 s")
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.ledger.fault(f"{manner.__name__}: {error!r}")
            finally:
                writer.close()
            await asyncio.sleep(self.rng.random() * 0.05)

    async def _head(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        return int(head[0].split()[1]), headers

    async def _answer(self, reader: asyncio.StreamReader) -> None:
        """One answer that is not chunked: a completion, or an error of a kind that a client can act on."""
        status, headers = await self._head(reader)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        if status == 200:
            self.ledger.put(f"HTTP {body['choices'][0]['finish_reason']}")
        elif status in (429, 503, 504):
            self.ledger.put(f"HTTP {status} {body['error']['code']}")
        else:
            self.ledger.fault(f"HTTP {status}: {body}")

    async def _whole(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._request(stream=False))
        await self._answer(reader)

    async def _pipeline(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            writer.write(self._request(stream=False))
        for _ in range(3):
            await self._answer(reader)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._request(stream=True))
        head = await reader.readuntil(b"\r\n\r\n")
        if b"200 OK" not in head.split(b"\r\n")[0]:
            self.ledger.put(f"HTTP {head.split()[1].decode()} before a stream")
            return
        text = await reader.readuntil(b"\r\n0\r\n\r\n")
        done, failed = text.count(b'"finish_reason":"'), text.count(b'"error":')
        if done + failed != 1:
            self.ledger.fault(f"a stream with {done} ends and {failed} errors: {text[-300:]!r}")
        self.ledger.put("HTTP stream" if done else "HTTP stream with an error event")

    async def _reset(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._request(stream=True))
        await reader.read(self.rng.randrange(1, 2000))
        writer.transport.abort()
        self.ledger.put("HTTP reset by the client")

    async def _half(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = self._request(stream=True)
        writer.write(request[: self.rng.randrange(len(request))])
        await writer.drain()
        self.ledger.put("HTTP half a request")

    async def _stall(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()
        writer.write(self._request(stream=True))
        await asyncio.sleep(1.0)
        writer.transport.abort()
        self.ledger.put("HTTP never read")
