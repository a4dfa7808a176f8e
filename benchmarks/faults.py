"""The drills that benchmarks/drills.py times: each puts a group or a service through one fault and says how it went."""

from __future__ import annotations

import gc
import math
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import smg
from smg import SamplingParams
from smg.bench import arrival
from smg.mock import Simulator
from tests.drills.fleet import Fleet, Nursery, wait_life, wait_until

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "http"))

from scripted import MODEL
from serving import BODY, CHAT, STREAM, Served

from tests.engine.test_ranks import Dialer

PROMPT = [1, 2, 3]
LONG = 1_000_000
Times = list[float]  # seconds


def params(seed: int, tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


def milliseconds(times: Times) -> str:
    return f"{statistics.median(times) * 1e3:.1f} ms (worst of {len(times)}: {max(times) * 1e3:.1f})"


class Bench:
    """What drills have in common: a place for sockets and a nursery of ranks."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.nursery = Nursery()
        self._names = iter(range(10_000))

    def close(self) -> None:
        self.nursery.close()

    @contextmanager
    def directory(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="smg-drills-") as name:
            yield Path(name)

    @contextmanager
    def group(self, ranks: int = 1, **options: Any) -> Iterator[smg.EngineGroup]:
        """A group that no rank has dialed."""
        with (
            self.directory() as directory,
            smg.EngineGroup(
                f"ipc://{directory}/e",
                backend="tokenspeed",
                ranks=ranks,
                handshake_address="tcp://127.0.0.1:0",
                **options,
            ) as made,
        ):
            yield made

    @contextmanager
    def fleet(self, ranks: int = 4, group: dict[str, Any] | None = None, **options: Any) -> Iterator[Fleet]:
        """A live group with a process per rank."""
        with self.group(ranks, **(group or {})) as made:
            fleet = Fleet(self.nursery, made, **options)
            try:
                made.wait_ready(30)
                yield fleet
            finally:
                fleet.close()

    @contextmanager
    def service(self, ranks: int = 2, **mock: Any) -> Iterator[Served]:
        """An HTTP front whose simulated ranks are threads of this process."""
        with self.directory() as directory:
            served = Served(directory, {}, ranks, {"step_ms": 5, **mock})
            try:
                yield served
            finally:
                served.close()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


# ---------------------------------------------------------------- ranks


def kill_one_of_four(bench: Bench) -> str:
    """SIGKILL until the last of the rank's 25 streams has its error; the other 75 finish."""
    times = []
    for _ in range(bench.rounds):
        with bench.fleet(4) as fleet:
            outlet = fleet.group.outlet()
            for seed in range(100):
                fleet.group.submit(PROMPT, params(seed, 120), outlet=outlet)
            wait_until(lambda group=fleet.group: sum(group.counters["tokens"]) > 400)
            killed = time.monotonic()
            fleet.kill(0)
            deaths, finished = [], 0
            while len(deaths) + finished < 100:
                outlet.wait_blocking(10)
                for _, out in outlet.take():
                    if isinstance(out, smg.RankDied):
                        deaths.append(time.monotonic() - killed)
                    else:
                        finished += out.finish_reason is not None
            assert len(deaths) == 25
            times.append(max(deaths))
    return f"its 25 of 100 streams raise `RankDied` after {milliseconds(times)}; the other 75 finish"


def crash_in_load(bench: Bench) -> str:
    """A process that goes between INIT and READY: until its successor, already waiting to dial, is live."""
    times = []
    for _ in range(bench.rounds):
        with bench.group() as group:
            loading = Dialer(group, 0)
            loading.hello()
            loading.init()
            gone = time.monotonic()
            loading.close()
            with Simulator(group.url, handshake_address=group.handshake_address):
                group.wait_ready(30)
                times.append(time.monotonic() - gone)
    return f"its successor, started at once, is live {milliseconds(times)} later"


def restart_one(bench: Bench) -> str:
    """From the start of a new process to its first token."""
    times, dialed = [], []
    with bench.fleet(2) as fleet:
        for life in range(2, bench.rounds + 2):
            fleet.kill(0)
            began = time.monotonic()
            fleet.start(0)
            wait_until(lambda life=life: fleet.group.ranks[0].incarnation == life)
            dialed.append(time.monotonic() - began)
            wait_life(fleet.group, 0, life)
            next(iter(fleet.group.submit(PROMPT, params(1, 1), rank=0).blocking(10)))
            times.append(time.monotonic() - began)
    own = [whole - until for whole, until in zip(times, dialed, strict=True)]
    return f"serves {milliseconds(times)} after its process was started, {milliseconds(own)} of that after its HELLO"


def kill_all(bench: Bench) -> str:
    """All ranks SIGKILLed with work in flight and restarted at once: error, then service."""
    errors, served = [], []
    for _ in range(bench.rounds):
        with bench.fleet(2) as fleet:
            streams = [fleet.group.submit(PROMPT, params(1, LONG), rank=rank).blocking(10) for rank in (0, 1)]
            for stream in streams:
                next(stream)
            killed = time.monotonic()
            for rank in (0, 1):
                fleet.kill(rank)
                fleet.start(rank)
            for stream in streams:
                try:
                    for _ in stream:
                        pass
                except smg.RankDied:
                    errors.append(time.monotonic() - killed)
            for rank in (0, 1):
                wait_life(fleet.group, rank, 2)
            next(iter(fleet.group.submit(PROMPT, params(1, 1)).blocking(10)))
            served.append(time.monotonic() - killed)
    return f"errors after {milliseconds(errors)}; served again {milliseconds(served)} after the kill"


def restart_in_the_same_instant(bench: Bench) -> str:
    chance = [-0.01 + 0.04 * i / 99 for i in range(100)]
    with bench.fleet(1) as fleet:
        for life, pause in enumerate(chance, 2):
            fleet.replace(0, pause)
            wait_life(fleet.group, 0, life)
            next(iter(fleet.group.submit(PROMPT, params(1, 1)).blocking(10)))
    return "gets in, 100 times of 100, from 10 ms before its predecessor's death to 30 ms after"


def restart_twice(bench: Bench) -> str:
    """Two restarts in a row, each in the instant of its predecessor's SIGKILL, until a request is answered."""
    chance, times = random.Random(7), []
    with bench.fleet(1) as fleet:
        for seed in range(30 * bench.rounds):
            for _ in range(2):
                fleet.replace(0, chance.uniform(-0.01, 0.03))
                time.sleep(chance.uniform(0, 0.03))
            began, answered = time.monotonic(), False
            while not answered:  # its predecessors are dead, so that only the last can
                assert time.monotonic() < began + 10, fleet.group.ranks
                try:
                    answered = bool(list(fleet.group.submit(PROMPT, params(seed, 1)).blocking(10)))
                except (smg.NoRank, smg.RankDied):
                    time.sleep(0.001)
            times.append(time.monotonic() - began)
    return f"the last gets in, {len(times)} times of {len(times)}; answers after {milliseconds(times)}"


def silent_claim(bench: Bench) -> str:
    """A connection with rank 0's identity that says nothing, made between the rank's INIT and its READY."""
    times = []
    for _ in range(bench.rounds):
        with bench.group() as group, closing(Dialer(group, 0)) as rank:
            rank.hello()
            rank.init()
            with closing(Dialer(group, 0)):
                wait_until(lambda group=group: len(group._loop._connections.open) == 2)
                time.sleep(0.1)  # nothing tells when it has taken the identity over
                rank.ready()
                rank.register()
                began = time.monotonic()
                group.wait_ready(30)
                times.append(time.monotonic() - began)
    return f"its READY goes unheard; it takes work {milliseconds(times)} after it has registered"


def stop(bench: Bench) -> str:
    """SIGSTOP with work in flight, then SIGCONT."""
    stalled, back = [], []
    for _ in range(bench.rounds):
        with bench.fleet(2, group={"stall_timeout": 0.2}) as fleet:
            stream = fleet.group.submit(PROMPT, params(1, LONG), rank=0).blocking(10)
            next(stream)
            fleet.signal(0, signal.SIGSTOP)
            stalled.append(wait_until(lambda group=fleet.group: group.ranks[0].state == "stalled"))
            fleet.signal(0, signal.SIGCONT)
            back.append(wait_until(lambda group=fleet.group: group.ranks[0].state == "live"))
    return f"stalled after {milliseconds(stalled)} with a timeout of 200 ms; back {milliseconds(back)} after SIGCONT"


def sentinel(bench: Bench) -> str:
    times = []
    for _ in range(bench.rounds):
        with bench.service(2) as served:
            group = served.group
            streams = [group.submit(PROMPT, params(rank, LONG), rank=rank).blocking(10) for rank in (0, 1)]
            for stream in streams:
                next(stream)
            sent = time.monotonic()
            assert served.mock is not None
            served.mock.sentinel(0)
            try:
                for _ in streams[0]:
                    pass
            except smg.RankDied:
                times.append(time.monotonic() - sent)
            next(streams[1])
            assert served.chat().status == 200
    return f"that rank's streams fail after {milliseconds(times)}; the other rank's go on, and new requests are served"


def kill_behind_http(bench: Bench) -> str:
    """SIGKILL of one of two ranks with a client each: until its client has the error event."""
    times = []
    for _ in range(bench.rounds):
        with (
            bench.directory() as directory,
            closing(Served(directory, {}, 2, None)) as served,
            closing(Fleet(bench.nursery, served.group)) as fleet,
        ):
            served.group.wait_ready(30)
            with served.dial() as one, served.dial() as other:
                for raw in (one, other):
                    raw.post(CHAT, STREAM | {"max_tokens": 200, "ignore_eos": True})
                    raw.until(b'"content":"', 3)
                if b"X-SMG-Rank: 0\r\n" not in one.received:
                    one, other = other, one
                killed = time.monotonic()
                fleet.kill(0)
                one.until(b"rank_died")
                times.append(time.monotonic() - killed)
                other.until(b'"finish_reason":"length"')
                assert served.chat().status == 200
    return f"its stream has an error event after {milliseconds(times)}; the other finishes, new requests are served"


def retry(bench: Bench) -> str:
    times = []
    for _ in range(bench.rounds):
        with bench.service(2, hold=True) as served, served.dial() as raw:
            assert served.mock is not None
            raw.post(CHAT, BODY)
            first = served.mock.wait_for("add")["rank"]
            killed = time.monotonic()
            served.mock.die(first)
            served.mock.wait_for("add", count=2)
            times.append(time.monotonic() - killed)
            served.mock.release(1 - first)
            assert raw.until(b'"usage"').startswith(b"HTTP/1.1 200 ")
    return f"is at another rank after {milliseconds(times)}; its client gets a 200"


# ---------------------------------------------------------------- dialers


@contextmanager
def claimed(bench: Bench) -> Iterator[tuple[smg.EngineGroup, Simulator]]:
    with (
        bench.group(2) as group,
        Simulator(group.url, ranks=2, handshake_address=group.handshake_address, step_ms=0) as mock,
    ):
        group.wait_ready(10)
        yield group, mock


def second_dialer(bench: Bench) -> str:
    with claimed(bench) as (group, mock):
        second = Dialer(group, 0)
        try:
            second.hello()
            wait_until(lambda: group.ranks[0].duplicate_hello == 1)
            for seed in range(100):
                stream = group.submit(PROMPT, params(seed, 2), rank=0)
                assert [t for out in stream.blocking(10) for t in out.token_ids] == mock.reply(seed, 2)
        finally:
            second.close()
    return "100 of 100 requests for rank 0 are answered by the real one; the other is counted, and logged once"


def bad_hellos(bench: Bench) -> str:
    """Duplicate, out-of-range and garbage HELLOs while a group forms."""
    times = []
    for _ in range(bench.rounds):
        with bench.group(2) as group:
            stray, loud = Dialer(group, 5), Dialer(group, 0)
            try:
                stray.hello()
                loud.handshake.send(b"\xc1")
                wait_until(lambda group=group: group._loop.refused == group.ranks[0].refused == 1)
                loud.close()
                began = time.monotonic()
                with Simulator(group.url, ranks=2, handshake_address=group.handshake_address):
                    group.wait_ready(10)
                    times.append(time.monotonic() - began)
            finally:
                stray.close()
    return f"refused and counted; the group is ready {milliseconds(times)} after its ranks dial"


# ---------------------------------------------------------------- clients


def leave(bench: Bench, **mock: Any) -> str:
    times = []
    for _ in range(bench.rounds):
        with bench.service(1, **mock) as served:
            assert served.mock is not None
            raw = served.dial()
            raw.post(CHAT, STREAM | {"max_tokens": 10_000})
            served.mock.wait_for("add")
            if not mock.get("hold"):
                raw.until(b"data: ", 3)
            left = time.monotonic()
            raw.close()
            served.mock.wait_for("abort")
            times.append(time.monotonic() - left)
    return f"ABORT at the engine after {milliseconds(times)}"


def bad_frames(bench: Bench) -> str:
    times = []
    for _ in range(bench.rounds):
        with bench.service(2) as served:
            group, mock = served.group, served.mock
            assert mock is not None
            streams = [group.submit(PROMPT, params(rank, LONG), rank=rank).blocking(10) for rank in (0, 1)]
            for stream in streams:
                next(stream)
            mock.hold(0)
            sent = time.monotonic()
            mock.malformed(0, kind="garbage", count=3)
            try:
                for _ in streams[0]:
                    pass
            except smg.RankDied:
                times.append(time.monotonic() - sent)
            next(streams[1])
            assert served.chat().status == 200
    return f"that rank's streams fail after {milliseconds(times)}; the other rank's go on, and new requests are served"


def slow_readers(bench: Bench) -> str:
    """64 clients that do not read, 32k tokens each, at 1 ms a step."""
    with (
        bench.directory() as directory,
        closing(Served(directory, {}, 1, None)) as served,
        closing(Fleet(bench.nursery, served.group, step_ms=1.0, kv_pages=100_000, model_path=str(MODEL))),
    ):
        group, clients, delays = served.group, [], []
        group.wait_ready(30)
        assert served.chat().status == 200
        before = resident()
        for seed in range(64):
            raw = served.dial(window=4096)
            clients.append(raw)
            raw.post(CHAT, STREAM | {"max_tokens": 32_000, "seed": seed, "ignore_eos": True})
        while group.counters["tokens"][0] < 64 * 32_000:
            began = time.monotonic()
            assert served.chat(max_tokens=1).status == 200
            delays.append(time.monotonic() - began)
            time.sleep(0.02)
        grown = resident() - before
        for raw in clients:
            raw.close()
        wait_until(lambda: served.front.admission.active == 0)
    return (
        f"RSS grows by {grown / 1e6:.0f} MB ({grown / 64 / 32_000:.0f} B per token); "
        f"another client's one-token chat takes {milliseconds(delays)}"
    )


def unread(bench: Bench, turn: float = 4.0, settle: float = 0.5) -> str:
    """A reader's gaps beside 1,000 streams that run, which are read and not read in turn: medians over the turns.

    One group, one engine and one reader for all turns, so that whatever else the machine does falls on both kinds.
    `turn` and `settle`, the time after a change that is not counted, are in seconds.
    """
    turns = max(4, bench.rounds)
    with bench.fleet(1, step_ms=20.0, max_running=2000, kv_pages=1_000_000) as fleet:
        group, reading, halt = fleet.group, threading.Event(), threading.Event()
        outlet = group.outlet()
        streams = [group.submit(PROMPT, params(seed, LONG), outlet=outlet) for seed in range(1000)]

        def drain() -> None:
            while not halt.is_set():
                if reading.wait(0.1):
                    outlet.wait_blocking(0.1)
                    outlet.take()

        drainer = threading.Thread(target=drain)
        drainer.start()
        reader = group.submit(PROMPT, params(1, LONG)).blocking(10)

        def gaps(seconds: float) -> Times:
            last = began = time.monotonic()
            found = []
            for _ in reader:
                now = time.monotonic()
                found.append(now - last)
                last = now
                if now > began + seconds:
                    break
            return found

        gaps(settle)
        size, tokens = resident(), sum(group.counters["tokens"])
        gaps(turn)  # for the first time, since later what was freed is used again
        held = (resident() - size) / (sum(group.counters["tokens"]) - tokens)
        p99: dict[bool, Times] = {True: [], False: []}
        for index in range(2 * turns):
            all_read = index % 4 in (0, 3)  # as often before as after the other kind
            (reading.set if all_read else reading.clear)()
            gaps(settle)
            p99[all_read].append(statistics.quantiles(gaps(turn), n=100)[98])
        halt.set()
        drainer.join()
        for stream in streams:
            stream.abort()
    ignored, read = (statistics.median(p99[kind]) for kind in (False, True))
    return (
        f"p99 between another stream's tokens {ignored * 1e3:.2f} ms, {read * 1e3:.2f} ms when all are read: "
        f"{100 * (ignored / read - 1):+.1f} % (medians of {turns} turns each, 20 ms steps; the turns' own are "
        f"{min(p99[False]) * 1e3:.1f}–{max(p99[False]) * 1e3:.1f} and {min(p99[True]) * 1e3:.1f}–"
        f"{max(p99[True]) * 1e3:.1f} ms); {held:.1f} B held per token"
    )


# ---------------------------------------------------------------- a busy host, and an engine that does not read


def pump_beside(load: Callable[[Callable[[], bool]], None], count: int) -> str:
    """Frame sent to counters up to date while this process does `load` until it is told to stop."""
    with (
        tempfile.TemporaryDirectory(prefix="smg-drills-") as directory,
        smg.EngineGroup(f"ipc://{directory}/e", backend="tokenspeed", handshake_address="tcp://127.0.0.1:0") as group,
    ):
        outlet = group.outlet()
        sender = arrival.Sender(group.handshake_address, False, outlet.fileno(), count)
        group.wait_ready(30)
        streams = [group.submit(PROMPT, outlet=outlet) for _ in range(arrival.ROWS)]
        worker = threading.Thread(target=sender.serve, args=(outlet.take,))
        worker.start()
        while group.counters["tokens"][0] < 3 * len(streams):  # by then the rank's start is dealt with
            time.sleep(0.001)
        load(worker.is_alive)
        worker.join()
        delays = sender.delays()
        assert group.counters["tokens"] == [count * len(streams)]  # nothing lost
    own = sorted(delay - waited for delay, waited in delays)
    whole = sorted(delay for delay, _ in delays)
    at = math.ceil(0.99 * len(own)) - 1
    return (
        f"p50 {own[len(own) // 2]:.2f}, p99 {own[at]:.2f}, worst {own[-1]:.2f} ms of {count} frames "
        f"(p99 {whole[at]:.2f} ms with the wait for a CPU); nothing lost"
    )


def spinning(bench: Bench) -> str:
    def spin(wanted: Callable[[], bool]) -> None:
        while wanted():
            pass

    return pump_beside(spin, 100 * bench.rounds)


def collecting(bench: Bench) -> str:
    heap = [[] for _ in range(5_000_000)]  # type: ignore[var-annotated]

    def collect(wanted: Callable[[], bool]) -> None:
        while wanted():
            gc.collect()

    try:
        return pump_beside(collect, 10 * bench.rounds)
    finally:
        del heap


def full_engine(bench: Bench) -> str:
    with bench.fleet(1, step_ms=0, max_running=100_000) as fleet:
        group = fleet.group
        outlet = group.outlet()
        fleet.signal(0, signal.SIGSTOP)
        taken = refused = 0
        for seed in range(20_000):
            try:
                group.submit([1] * 50, params(seed, 1), outlet=outlet)
                taken += 1
            except smg.Overloaded:
                refused += 1
        fleet.signal(0, signal.SIGCONT)
        done = 0
        while done < taken:
            outlet.wait_blocking(20)
            done += len(outlet.take())
        assert group.counters["finished"] == [taken]
    return f"of 20,000: {taken:,} delivered and answered, {refused:,} refused with `Overloaded` (HTTP 429), none lost"
