"""smg: a router between LLM serving code and data-parallel engine ranks that speak msgpack over ZeroMQ.

import smg

async with smg.EngineGroup("ipc:///run/user/1000/smg/e-31000", backend="tokenspeed", ranks=2) as group:
    await group.ready(timeout=600)
    async for out in group.submit([1, 2, 3], smg.SamplingParams(max_tokens=64)):
        print(out.rank, out.token_ids, out.finish_reason)
"""

from smg._compiled import check_distribution, require
from smg._version import __version__

require()

from smg._outlets import Outlet, Output  # noqa: E402  (after the check that it is there)
from smg._streams import Stream  # noqa: E402
from smg.engine.group import EngineGroup, RankInfo  # noqa: E402
from smg.errors import (  # noqa: E402
    Aborted,
    AddressError,
    Closed,
    DeadlineExceeded,
    DecodeError,
    Error,
    ForkedError,
    HandshakeError,
    InvalidRank,
    InvalidRequest,
    NoRank,
    NotReady,
    Overloaded,
    RankDied,
    StreamError,
    UtilityError,
    UtilityTimeout,
)
from smg.routing.router import Router  # noqa: E402
from smg.sampling import SamplingParams  # noqa: E402

__all__ = [
    "Aborted",
    "AddressError",
    "Closed",
    "DeadlineExceeded",
    "DecodeError",
    "EngineGroup",
    "Error",
    "ForkedError",
    "HandshakeError",
    "InvalidRank",
    "InvalidRequest",
    "NoRank",
    "NotReady",
    "Outlet",
    "Output",
    "Overloaded",
    "RankDied",
    "RankInfo",
    "Router",
    "SamplingParams",
    "Stream",
    "StreamError",
    "UtilityError",
    "UtilityTimeout",
    "__version__",
    "check_distribution",
]
