"""A core without sockets: what decoding and applying an engine's step costs, and nothing beside it."""

from __future__ import annotations

from typing import Any

from smg._fastpath import Core
from smg._outlets import Outlet, new_outlet
from smg._streams import submit
from smg.bench import frames
from smg.protocol import tokenspeed
from smg.sampling import SamplingParams

LIVE = 2  # as Core.set_state numbers lifecycle.State


def live_core(requests: int) -> tuple[Core, Outlet, list[Any], bytes]:
    """A core with one live rank, its outlet, the running requests' streams and a step's frame for them."""
    core = Core(1, backend="tokenspeed", decode_cold=lambda data, top: None, stall_timeout=0, max_inflight=0)
    core.set_state(0, LIVE)
    outlet = new_outlet(core)
    payload = tokenspeed.encode_add("0" * 24, [1, 2, 3], SamplingParams())
    streams = [submit(core, payload, tokenspeed.RID_OFFSET, outlet=outlet) for _ in range(requests)]
    frame = frames.encode([stream.request_id for stream in streams], range(1234, 1234 + requests))
    return core, outlet, streams, frame
