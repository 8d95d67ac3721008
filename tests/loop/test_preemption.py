"""Synchronization of the optimizer step at which several processes stop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.fidelity.conftest import environment_of_runs
from tests.scenarios.other_processes import MAX_WAIT_SECONDS

# The second of two processes receives a signal in its third step.
PROCESS = """
import json, signal, sys
import torch.distributed as dist
from littrainer.loop.preemption import Preemption
from tests.scenarios.other_processes import end_process

rank, rendezvous = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
preemption = Preemption([signal.SIGUSR1, signal.SIGTERM])
preemption.start()
for step in range(1, 7):
    if rank == 1 and step == 3:
        signal.raise_signal(signal.SIGUSR1)
    dist.barrier()
    preemption.sync_signal()
    if preemption.stop_signal is not None:
        break
preemption.stop()
print(json.dumps([step, preemption.stop_signal.name, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL]))
end_process()
"""


def test_a_signal_to_a_single_process_stops_both_at_the_same_step(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment_of_runs(),
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=MAX_WAIT_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [json.loads(output.splitlines()[-1]) for output in outputs] == [[3, "SIGUSR1", True]] * 2
