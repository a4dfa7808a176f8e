"""The ranks that receivers are measured with: their frames are the engines' own, and what they send arrives."""

from __future__ import annotations

import shutil
import time

import pytest

from smg.bench import frames, vllm_frames
from smg.bench.ranks import groups_with_ranks
from smg.bench.simulator import frame_of
from smg.sampling import SamplingParams

pytestmark = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="the simulator is C: needs a compiler (cc)"
)
MAKERS = {"tokenspeed": frames, "vllm": vllm_frames}


@pytest.mark.parametrize("engine", MAKERS)
@pytest.mark.parametrize("requests", [0, 1, 15, 16, 300])
def test_a_simulated_frame_is_byte_for_byte_what_msgspec_makes_of_it(engine: str, requests: int) -> None:
    frame = frame_of(requests, engine)
    assert MAKERS[engine].reencode(frame) == frame


@pytest.mark.parametrize("engine", MAKERS)
def test_ranks_hold_until_they_are_started_and_then_make_every_token(engine: str) -> None:
    with groups_with_ranks(engine, 1, 2) as ([group], [ranks]):
        outlet = group.outlet()
        streams = [group.submit([1, 2, 3], SamplingParams(max_tokens=5), outlet=outlet) for _ in range(6)]
        until = time.monotonic() + 10
        while ranks.adds() < len(streams):
            assert time.monotonic() < until
        assert outlet.take() == []
        ranks.start(0)
        tokens, left = 0, len(streams)
        while left:
            assert outlet.wait_blocking(10)
            for _, out in outlet.take():
                tokens += len(out.token_ids)
                left -= out.finish_reason == "length"
        assert tokens == 30
        assert {stream.rank for stream in streams} == {0, 1}
