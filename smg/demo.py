"""`python -m smg demo`: two simulated ranks, the router, and eight chats streamed through the HTTP port."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

    from smg.http.service import Service
    from smg.mock import SimulatorProcess

MODEL = Path(__file__).parent / "data" / "demo-model"
MODEL_NAME = "smg-demo"
RANKS = 2
READY_TIMEOUT = 60.0  # seconds for the ranks to dial in
REDRAW = 0.05  # seconds between two pictures

QUESTIONS = (
    "How do I get across the river?",
    "What grows well in the shade?",
    "How long should the bread rest?",
    "Where does the old road lead?",
    "What should I measure first?",
    "How is the tide today?",
    "Which tools do I need for a shelf?",
    "When does the market open?",
    "What is left to do before the winter?",
    "How do I read this map?",
    "Where can I leave the boat?",
    "What makes a good soup?",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start two simulated engine ranks, a router in front of them and its HTTP port, then stream a few chats "
        "at once. Needs no GPU, no engine and no download; listens on 127.0.0.1 only and leaves nothing behind."
    )
    parser.add_argument("--keep", action="store_true", help="go on serving afterwards, until Ctrl-C")
    parser.add_argument("--chats", type=int, default=8, metavar="N", help="chats at once (default 8)")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="per chat (default 48)")
    parser.add_argument("--step-ms", type=float, default=40.0, metavar="MS", help="a decode step (default 40)")
    parser.add_argument("--port", type=int, default=0, help="HTTP port (default: one that is free)")


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns the exit status: 0, or 1 when it cannot start or a chat failed."""

    def ended(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, ended)
    # Ctrl-C goes to the ranks as well, and that they end then is no news.
    logging.getLogger("smg").setLevel(logging.ERROR)
    try:
        import uvloop

        from smg import check_distribution
        from smg.errors import Error
        from smg.mock import SimulatorEnded

        check_distribution()
    except ImportError as exc:
        print(f"smg demo: {exc}; install the extra: pip install 'smg-fastpath[server]'", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="smg-demo-") as directory:
        try:
            return int(uvloop.run(_demo(args, f"ipc://{directory}/engine")))
        except (Error, SimulatorEnded, OSError) as exc:
            print(f"smg demo: {exc}", file=sys.stderr)
            return 1
        except asyncio.CancelledError:  # SIGTERM
            return 128 + signal.SIGTERM


async def _demo(args: argparse.Namespace, worker_url: str) -> int:
    from smg.http.front import FrontOptions
    from smg.http.service import Service, ServiceOptions

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    options = ServiceOptions(
        worker_urls=[worker_url],
        backend="tokenspeed",
        model_path=str(MODEL),
        ranks=RANKS,
        port=args.port,
        prometheus_port=0,
        front=FrontOptions(served_model_name=MODEL_NAME),
    )
    simulator: SimulatorProcess | None = None
    try:
        async with Service(options) as service:
            print(f"router       {service.url}, ranks dial {service.groups[0].handshake_address}", flush=True)
            simulator = await _spawn(worker_url, args.step_ms)
            await service.groups[0].ready(READY_TIMEOUT)
            print(f"simulator    pid {simulator.pid}, {RANKS} ranks live\n", flush=True)
            failed = await _chats(service, args.chats, args.max_tokens)
            _report(service)
            if args.keep:
                print(f"\nserving until Ctrl-C; try\n\n{curl(service.url)}\n", flush=True)
                await asyncio.Event().wait()
    finally:
        if simulator is not None:
            simulator.close()
    print(
        "\nEverything is stopped again. To try it yourself:\n\n  python -m smg demo --keep --port 30000\n"
        f"{curl('http://127.0.0.1:30000')}",
        flush=True,
    )
    return 1 if failed else 0


async def _spawn(worker_url: str, step_ms: float) -> SimulatorProcess:
    """The ranks, in a process of their own; also when this is cancelled meanwhile, none is left over."""
    from smg import mock

    def start() -> SimulatorProcess:
        return mock.spawn(worker_url, ranks=RANKS, step_ms=step_ms, model_path=str(MODEL), record=False)

    starting = asyncio.get_running_loop().run_in_executor(None, start)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        try:
            (await starting).close()
        except mock.SimulatorEnded:
            pass  # Ctrl-C went to it as well
        raise


def curl(url: str) -> str:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, "stream": True}
    return f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


# ---------------------------------------------------------------- chats


@dataclass(slots=True)
class Chat:
    """One chat as its client sees it."""

    number: int
    question: str
    rank: str = "-"
    text: str = ""
    first_token: float = 0.0  # seconds
    ended: str = ""  # finish reason, or what went wrong

    @property
    def failed(self) -> bool:
        return self.ended not in ("stop", "length")


async def _chats(service: Service, count: int, max_tokens: int) -> int:
    """Stream `count` chats at once and show them; returns how many failed."""
    import aiohttp

    chats = [Chat(i + 1, QUESTIONS[i % len(QUESTIONS)]) for i in range(count)]
    picture = Picture(chats) if sys.stdout.isatty() else Lines(chats)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        talks = [asyncio.ensure_future(_talk(client, service.url, chat, max_tokens)) for chat in chats]
        try:
            waiting: set[asyncio.Future[None]] = set(talks)
            while waiting:
                _, waiting = await asyncio.wait(waiting, timeout=REDRAW)
                picture.show()
        finally:
            for talk in talks:
                talk.cancel()
            await asyncio.gather(*talks, return_exceptions=True)
    return sum(chat.failed for chat in chats)


async def _talk(client: aiohttp.ClientSession, url: str, chat: Chat, max_tokens: int) -> None:
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": chat.question}],
        "max_tokens": max_tokens,
        "seed": chat.number,
        "stream": True,
    }
    started = time.monotonic()
    try:
        async with client.post(f"{url}/v1/chat/completions", json=body) as response:
            chat.rank = response.headers.get("X-SMG-Rank", "-")
            async for line in response.content:
                _read_event(chat, line, started)
    except OSError as exc:
        chat.ended = str(exc)
    chat.ended = chat.ended or "no end"


def _read_event(chat: Chat, line: bytes, started: float) -> None:
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line[6:])
    if "error" in event:
        chat.ended = event["error"]["message"]
        return
    choice = event["choices"][0]
    chat.text += choice["delta"].get("content") or ""
    chat.first_token = chat.first_token or time.monotonic() - started
    chat.ended = choice["finish_reason"] or ""


class Picture:
    """All chats, a line each, drawn over and over on a terminal."""

    def __init__(self, chats: list[Chat]) -> None:
        self._chats = chats
        self._drawn = False

    def show(self) -> None:
        width = shutil.get_terminal_size().columns
        lines = []
        for chat in self._chats:
            start = f"chat {chat.number:2} rank {chat.rank:1} {'.' if chat.ended else '>'} "
            room = max(10, width - len(start) - 1)
            lines.append(f"\x1b[2K\x1b[2m{start}\x1b[0m{' '.join(chat.text.split())[-room:]}\n")
        up = f"\x1b[{len(lines)}A" if self._drawn else ""
        self._drawn = True
        print(up + "".join(lines), end="", flush=True)


class Lines:
    """A line when a chat's first words arrive, and one when it has ended, for where no terminal is."""

    def __init__(self, chats: list[Chat]) -> None:
        self._chats = chats
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def show(self) -> None:
        for chat in self._chats:
            if chat.text and chat.number not in self._begun:
                self._begun.add(chat.number)
                self._print(chat, "first words", f"{chat.text}...")
        for chat in self._chats:
            if chat.ended and chat.number not in self._ended:
                self._ended.add(chat.number)
                self._print(chat, chat.ended, chat.text)

    def _print(self, chat: Chat, what: str, text: str) -> None:
        print(f"chat {chat.number:2} rank {chat.rank} {what:11} | {' '.join(text.split())}", flush=True)


def _report(service: Service) -> None:
    group = service.groups[0]
    counters, latencies = group.counters, service.front.counts.latencies["/v1/chat/completions"]
    print()
    for rank in range(RANKS):
        print(f"rank {rank}       {counters['requests'][rank]} requests, {counters['tokens'][rank]} tokens")
    first, between = latencies.first_token, latencies.between_tokens
    if first.count and between.count:
        print(
            f"router       first token after {first.sum / first.count * 1e3:.1f} ms, then one every "
            f"{between.sum / between.count * 1e3:.1f} ms, on average"
        )
    print(f"in flight    {' '.join(map(str, group.in_flight))}, one figure per rank", flush=True)
