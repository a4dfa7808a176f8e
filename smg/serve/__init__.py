"""Engines and router launched together, and kept up: `python -m smg serve`.

The launchers say how each engine is started so that its ranks dial this router; they need nothing else of the
package, so that another tool can start engines with them too.
"""

from smg.serve.launchers import (
    LAUNCHERS,
    MockWorkerLauncher,
    SglangWorkerLauncher,
    TokenspeedWorkerLauncher,
    VllmWorkerLauncher,
    WorkerLauncher,
)

__all__ = [
    "LAUNCHERS",
    "MockWorkerLauncher",
    "SglangWorkerLauncher",
    "TokenspeedWorkerLauncher",
    "VllmWorkerLauncher",
    "WorkerLauncher",
]
