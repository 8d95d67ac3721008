"""Scripts for two processes, and functions that start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.compat.processes import environment
from tests.distributed.launchers import PREFIXES, PYTORCH_VARIABLES
from tests.distributed.process_launch import start_processes
from tests.scenarios.other_processes import MAX_WAIT_SECONDS

# Writes the facts about processes that a script sees before its Trainer to facts0.json or facts1.json.
FACTS = """
import json, os, pathlib, sys, time

import torch
import torch.distributed as dist

import littrainer.auto
from littrainer import TrainingArguments
from littrainer.distributed import collectives

folder = pathlib.Path(__file__).parent
# Some scripts change to their output folder.
os.chdir("/")
args = TrainingArguments(folder / "out", use_cpu=True, ddp_timeout=600)
rank = args.process_index
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
with args.main_process_first():
    if rank == 0:
        time.sleep(0.3)
        (folder / "cache").write_text("ready")
    found_cache = (folder / "cache").exists()
facts = {
    "world_size": args.world_size,
    "ranks": [args.process_index, args.local_process_index, args.local_rank],
    "local_world_size": args.local_world_size,
    "parallel_mode": args.parallel_mode.value,
    "device": [str(args.device), args.n_gpu],
    "writes": [args.should_save, args.should_log],
    "backend": dist.get_backend(),
    "sum": total.item(),
    "found_cache": found_cache,
    "can_agree": collectives._host_group is not None,
    "argv": sys.argv,
}
if "accelerate" in sys.argv:
    state = args.distributed_state
    facts["state"] = [state.num_processes, state.process_index, str(state.distributed_type)]
(folder / f"facts{rank}.json").write_text(json.dumps(facts))
if "fail" in sys.argv and rank == 1:
    raise ValueError("sample 17 is damaged")
if "fail" in sys.argv:
    dist.barrier()
"""

# The second process is killed during a training.
TRAINING = """
import os, signal, sys

sys.path.insert(0, os.getcwd())
from littrainer import Trainer
from tests.scenarios.trainers import quiet_trainer


class Dying(Trainer):
    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == 2 and self.args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_loss(*args, **kwargs)


quiet_trainer(sys.argv[1], kind=Dying, rows=400, max_steps=20, ddp_timeout=600).train()
"""


def get_plain_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a script without launcher, with these variables."""
    inherited = environment(TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    plain = {
        name: value
        for name, value in inherited.items()
        if name not in PYTORCH_VARIABLES and not name.startswith(PREFIXES)
    }
    return {**plain, **variables}


def run(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter, which starts further processes."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=get_plain_environment(**variables),
        capture_output=True,
        text=True,
        timeout=MAX_WAIT_SECONDS,
    )


def run_by_hand(script: Path, *arguments: str) -> list[tuple[int, str]]:
    """Run a script in two processes without agent; return their statuses and stderr."""
    command = [sys.executable, str(script), *arguments]
    processes, logs = start_processes(command, script.parent, environment=get_plain_environment())
    try:
        statuses = [process.wait(MAX_WAIT_SECONDS) for process in processes]
        return [(status, log.read_text()) for status, log in zip(statuses, logs, strict=True)]
    finally:
        for process in processes:
            process.kill()


# Starts its processes without LOCAL_WORLD_SIZE.
SPAWNING = """
import os, sys

import torch.multiprocessing

def work(rank, port, makes_state_first):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if makes_state_first:
        from accelerate import PartialState

        PartialState(cpu=True)
    import accelerate.state
    from littrainer import Trainer, TrainingArguments

    class Model(torch.nn.Linear):
        def forward(self, x, labels):
            return {"loss": ((super().forward(x) - labels) ** 2).mean()}

    rows = [{"x": torch.ones(2) * row, "labels": row} for row in range(8)]
    args = TrainingArguments("out", max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
    assert args.local_world_size == 2
    assert Trainer(Model(2, 1), args, train_dataset=rows).train().global_step == 1

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1], len(sys.argv) > 2), nprocs=2)
"""
