"""Which GPUs each worker sees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from smg.serve.errors import ServeError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def devices_of(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str] | None:
    """The GPUs that workers may have: those that CUDA_VISIBLE_DEVICES names, else all that this machine has.

    None when it is not set and the machine shows no NVIDIA device: then an engine sees what it sees.
    """
    named = environment.get(VARIABLE)
    if named is not None:
        return [device.strip() for device in named.split(",") if device.strip()]
    found = sum(1 for path in devices.glob("nvidia*") if path.name[6:].isdigit())
    return [str(index) for index in range(found)] if found else None


def partition(available: list[str] | None, worker: int, per_worker: int) -> list[str] | None:
    """The share of one worker, `per_worker` devices; None: it is not told. Raises ServeError: there are too few."""
    if available is None or per_worker == 0:
        return None
    first = worker * per_worker
    share = available[first : first + per_worker]
    if len(share) < per_worker:
        raise ServeError(
            f"worker {worker} needs GPUs {first}..{first + per_worker - 1} of those that {VARIABLE} allows, and it "
            f"allows {len(available)} ({','.join(available) or 'none'}): {per_worker} for each worker, which is "
            "tensor-parallel size x pipeline-parallel size x ranks; name more of them, start less, or leave the "
            "variable unset for an engine that needs none"
        )
    return share
