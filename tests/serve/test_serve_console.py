"""What the operator sees, on a terminal and without one, and where the engines' lines go."""

import io
import logging
from types import SimpleNamespace

import pytest

from smg.serve.console import EngineLogs, LiveConsole, PlainConsole, Progress, RankProgress
from smg.serve.errors import ServeError


def info(state, incarnation=1, index=0, fault="", refused=0):
    return SimpleNamespace(index=index, state=state, incarnation=incarnation, fault=fault, refused=refused)


def plan(index=0):
    return SimpleNamespace(name=f"worker {index}", url=f"ipc:///run/smg/engine-{31000 + index}")


# ------------------------------------------------------------ where a rank stands


def test_a_rank_goes_from_spawned_over_hello_and_loading_to_ready():
    progress = Progress(0, 100.0, [info("absent", 0)])
    states = [info("absent", 0), info("hello"), info("hello"), info("live"), info("stalled")]
    looks = [progress.look([state], 101.5)[0] for state in states]
    assert [look.state for look in looks] == ["spawned", "hello", "loading", "ready", "ready"]
    assert looks[0].elapsed == 1.5


def test_what_an_earlier_process_of_the_worker_was_counts_as_nothing():
    progress = Progress(0, 0.0, [info("dead", 3)])
    states = [info("live", 3), info("dead", 3), info("hello", 4), info("live", 4)]
    assert [progress.look([state], 1.0)[0].state for state in states] == ["spawned", "spawned", "hello", "ready"]


def test_a_rank_that_was_refused_says_why():
    progress = Progress(0, 0.0, [info("absent", 0)])
    assert progress.look([info("absent", 1, fault="not vllm", refused=1)], 1.0)[0].fault == "not vllm"


# ------------------------------------------------------------ plain lines


def test_plain_lines_tell_of_each_change_once_and_remind_of_what_takes_long(capsys):
    console = PlainConsole()
    for state, elapsed in [
        ("spawned", 0.1),
        ("hello", 0.5),
        ("loading", 0.6),
        ("loading", 9),
        ("loading", 31),
        ("ready", 40),
    ]:
        console.show([RankProgress(0, 1, state, elapsed)])
    assert capsys.readouterr().out.splitlines() == [
        "worker 0 rank 1: hello after 0.5 s",
        "worker 0 rank 1: loading after 0.6 s",
        "worker 0 rank 1: loading after 31.0 s",
        "worker 0 rank 1: ready after 40.0 s",
    ]


def test_a_fault_is_told_with_the_state(capsys):
    PlainConsole().show([RankProgress(0, 0, "spawned", 2.0, "not vllm")])
    assert capsys.readouterr().out == "worker 0 rank 0: spawned after 2.0 s (not vllm)\n"


def test_engines_lines_go_to_stderr_and_serves_own_to_stdout(capsys):
    console = PlainConsole()
    console.say("mine")
    console.engine("[worker 0] theirs")
    assert capsys.readouterr() == ("mine\n", "[worker 0] theirs\n")


# ------------------------------------------------------------ a terminal


def test_a_terminal_gets_a_table_that_is_drawn_over_and_lines_above_it():
    from rich.console import Console

    out = io.StringIO()
    console = LiveConsole(Console(file=out, force_terminal=True, width=80))
    handler = logging.StreamHandler()
    before = handler.stream
    logging.getLogger().addHandler(handler)
    try:
        console.show([RankProgress(0, 0, "loading", 1.0), RankProgress(1, 0, "spawned", 1.0)])
        console.engine("[worker 0] [bold]as it is[/]")
        assert handler.stream is not before  # the router's log goes above the table as well
        console.show([RankProgress(0, 0, "ready", 2.0), RankProgress(1, 0, "ready", 2.0)])
        console.settle()
    finally:
        logging.getLogger().removeHandler(handler)
    shown = out.getvalue()
    assert "[worker 0] [bold]as it is[/]\n" in shown
    assert shown.index("as it is") < shown.rindex("worker 0 rank 0")
    assert shown.count("ready") == 2
    assert "\x1b[" in shown  # it was drawn over


def test_before_and_after_the_start_a_terminal_gets_plain_lines(capsys):
    console = LiveConsole()
    console.say("before")
    console.settle()
    console.say("after")
    assert capsys.readouterr().out == "before\nafter\n"


# ------------------------------------------------------------ logs


def test_lines_carry_their_workers_name(capsys):
    logs = EngineLogs(None, PlainConsole())
    logs.sink(plan(1))("hello 100%")
    logs.close()
    assert capsys.readouterr().err == "[worker 1] hello 100%\n"


def test_a_log_file_for_each_worker_is_turned_over_when_it_is_full(tmp_path, capsys):
    logs = EngineLogs(str(tmp_path / "logs"), PlainConsole(), file_bytes=1000)
    write, other = logs.sink(plan(0)), logs.sink(plan(1))
    for number in range(1000):
        write(f"line {number} 100% %s")
    other("once")
    logs.close()
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == [*(f"engine-31000.log{end}" for end in ("", ".1", ".2", ".3", ".4")), "engine-31001.log"]
    files = [(tmp_path / "logs" / name) for name in reversed(names[:-1])]
    lines = "".join(file.read_text() for file in files).splitlines()
    assert lines == [f"line {number} 100% %s" for number in range(1000 - len(lines), 1000)]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert capsys.readouterr() == ("", "")


def test_a_worker_that_starts_again_goes_on_with_its_file(tmp_path):
    logs = EngineLogs(str(tmp_path), PlainConsole())
    logs.sink(plan())("first")
    logs.sink(plan())("second")
    logs.close()
    assert (tmp_path / "engine-31000.log").read_text() == "first\nsecond\n"


def test_a_log_directory_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ServeError, match=r"--log-dir .*/file/logs: Not a directory"):
        EngineLogs(str(tmp_path / "file" / "logs"), PlainConsole())
