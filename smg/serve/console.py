"""What the operator sees: where each rank stands while everything starts, and what engines print."""

from __future__ import annotations

import logging
import logging.handlers
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from smg.serve.errors import ServeError

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from smg.engine.group import RankInfo
    from smg.serve.plan import WorkerPlan

REMINDER = 30.0  # seconds between two lines about a rank that stays where it is
LOG_BYTES = 64 << 20
LOG_FILES = 4  # kept beside the one that is written


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Where one rank stands: spawned, hello (it was told where to connect), loading or ready; `fault`: why not.

    `elapsed`: seconds since its process was started.
    """

    worker: int
    rank: int
    state: str
    elapsed: float
    fault: str = ""

    def __str__(self) -> str:
        return f"worker {self.worker} rank {self.rank}: {self.state} after {self.elapsed:.1f} s" + (
            f" ({self.fault})" if self.fault else ""
        )


class Progress:
    """The states of one worker's ranks as they are looked at, for as long as one process starts."""

    def __init__(self, worker: int, started: float, earlier: Sequence[RankInfo]) -> None:
        self._worker = worker
        self._started = started
        self._earlier = [info.incarnation for info in earlier]
        self._greeted: set[int] = set()

    def look(self, infos: Sequence[RankInfo], now: float) -> list[RankProgress]:
        """Every rank; what an earlier process left behind counts as nothing."""
        found = []
        for info, earlier in zip(infos, self._earlier, strict=True):
            state, fault = "spawned", info.fault if info.refused else ""
            if info.incarnation > earlier:
                if info.state == "hello":
                    # it loads from when it was told where to connect; before that it is seen once as having dialed
                    state = "loading" if info.index in self._greeted else "hello"
                    self._greeted.add(info.index)
                elif info.state in ("live", "stalled"):
                    state, fault = "ready", ""
                else:
                    fault = info.fault
            found.append(RankProgress(self._worker, info.index, state, now - self._started, fault))
        return found


class Console(Protocol):
    """Where lines go. `say` and `engine` may be called from any thread."""

    def say(self, text: str) -> None:
        """A line of serve's own, on stdout."""

    def engine(self, line: str) -> None:
        """A line of an engine, with its prefix, on stderr."""

    def show(self, ranks: Sequence[RankProgress]) -> None:
        """Where all ranks stand now, while they start."""

    def settle(self) -> None:
        """The start is over."""


class PlainConsole:
    """A line for each thing that happens."""

    def __init__(self) -> None:
        self._shown: dict[tuple[int, int], tuple[str, str]] = {}
        self._told: dict[tuple[int, int], float] = {}

    def say(self, text: str) -> None:
        _write_line(sys.stdout, text)

    def engine(self, line: str) -> None:
        _write_line(sys.stderr, line)

    def show(self, ranks: Sequence[RankProgress]) -> None:
        for rank in ranks:
            key, state = (rank.worker, rank.rank), (rank.state, rank.fault)
            self._shown.setdefault(key, ("spawned", ""))  # which was said with the pid
            waits = rank.state != "ready" and rank.elapsed - self._told.get(key, 0.0) >= REMINDER
            if waits or self._shown.get(key) != state:
                self._shown[key] = state
                self._told[key] = rank.elapsed
                self.say(str(rank))

    def settle(self) -> None:
        self._shown.clear()
        self._told.clear()


def _write_line(stream: TextIO, text: str) -> None:
    stream.write(f"{text}\n")  # at once, since several threads do
    stream.flush()


class LiveConsole:
    """A table that is drawn over, with all lines above it: for a terminal."""

    def __init__(self, terminal: Terminal | None = None) -> None:
        from rich.live import Live

        self._live = Live(console=terminal, refresh_per_second=8)
        self._started = False
        self._plain = PlainConsole()

    def say(self, text: str) -> None:
        self._print(text, self._plain.say)

    def engine(self, line: str) -> None:
        self._print(line, self._plain.engine)

    def _print(self, text: str, plain: Callable[[str], None]) -> None:
        if self._started:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            plain(text)

    def show(self, ranks: Sequence[RankProgress]) -> None:
        from rich.spinner import Spinner
        from rich.table import Table

        if not self._started:
            self._started = True
            self._live.start()
            _redirect_logging()
        table = Table.grid(padding=(0, 2))
        for rank in ranks:
            state = f"[green]{rank.state}[/]" if rank.state == "ready" else Spinner("dots", text=rank.state)
            name = f"worker {rank.worker} rank {rank.rank}"
            table.add_row(name, state, f"{rank.elapsed:.0f} s", rank.fault)
        self._live.update(table)

    def settle(self) -> None:
        if self._started:
            self._started = False
            self._live.stop()
            _redirect_logging()


def _redirect_logging() -> None:
    """Let log lines go where stderr goes now: above the table while there is one."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)


def make_console() -> Console:
    """The one that suits where stdout goes."""
    return LiveConsole() if sys.stdout.isatty() else PlainConsole()


class EngineLogs:
    """Where the engines' lines go: to the console behind `[worker N]`, or to a file for each worker."""

    def __init__(self, directory: str | None, console: Console, *, file_bytes: int = LOG_BYTES) -> None:
        self._directory = None if directory is None else Path(directory)
        self._console = console
        self._file_bytes = file_bytes
        self._files: dict[str, logging.Handler] = {}
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ServeError(f"--log-dir {directory}: {error.strerror}") from None

    def sink(self, plan: WorkerPlan) -> Callable[[str], None]:
        """What takes the lines of one worker, also of its later processes."""
        if self._directory is None:
            return lambda line: self._console.engine(f"[{plan.name}] {line}")
        path = self._directory / f"{Path(plan.url).name}.log"
        handler = self._files.get(plan.url)
        if handler is None:
            try:
                handler = logging.handlers.RotatingFileHandler(
                    path, maxBytes=self._file_bytes, backupCount=LOG_FILES, encoding="utf-8"
                )
            except OSError as error:
                raise ServeError(f"--log-dir: {path}: {error.strerror}") from None
            self._files[plan.url] = handler
        return lambda line: _write(handler, line)

    def close(self) -> None:
        for handler in self._files.values():
            handler.close()


def _write(handler: logging.Handler, line: str) -> None:
    handler.handle(logging.LogRecord("engine", logging.INFO, "", 0, line, None, None))
