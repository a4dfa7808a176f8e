"""Engine simulators: ranks that dial in, decode requests and emit output frames as the real engines do.

`spawn` starts one as a process (to kill, stop or measure), `Simulator` runs one in a thread. Both give the
same handle, `Controls`: operations and faults by name, and events to wait for, so that tests never sleep.
Everything a simulator can be told at its start is a field of `Settings`; `python -m smg mock --help` has it.

    with smg.mock.spawn(url, ranks=2, hold=True) as mock:   # requests are taken, but no step is made
        mock.wait_live()
        stream = group.submit(...)
        mock.wait_for("add", rank=0)                        # it has arrived
        mock.step(rank=0)                                   # exactly one step: the first token
        mock.kill()
"""

from smg.mock.control import Controls, SimulatorEnded
from smg.mock.process import SimulatorProcess, spawn
from smg.mock.settings import Settings
from smg.mock.simulator import Simulator

__all__ = ["Controls", "Settings", "Simulator", "SimulatorEnded", "SimulatorProcess", "spawn"]
