"""A training script for `littrainer run` with faults at optimizer steps, started with a folder and a plan.

The plan is JSON: `faults`, a list of [start, rank, step, kind] with starts counted from 1; `output_dir`; `arguments`;
and `dropout`. Each process writes start, step and rows of each optimizer step to `steps-<rank>`.

Errors name the start, since an error that repeats at the same step is not restarted.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

FOLDER, PLAN = Path(sys.argv[1]), json.loads(sys.argv[2])
RANK = int(os.environ.get("RANK", "0"))
STARTS = FOLDER / f"starts-{os.environ['WORLD_SIZE']}-{RANK}"
FOLDER.mkdir(exist_ok=True)
with open(STARTS, "a") as file:
    file.write("x")
# Starts with another number of processes count too.
START = sum(len(path.read_text()) for path in FOLDER.glob(f"starts-*-{RANK}"))


def faults_at(step: int) -> list[str]:
    return [kind for start, rank, at, kind in PLAN["faults"] if (start, rank, at) == (START, RANK, step)]


def end_by_signals(step: int) -> None:
    for kind in faults_at(step):
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


# A process may die before its first step, as without its device.
end_by_signals(0)

import fsspec  # noqa: E402
import torch  # noqa: E402
from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from torch import nn  # noqa: E402

from littrainer import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from littrainer.checkpoint.layout import checkpoint_step  # noqa: E402

ROWS = 24


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, row: Any = None) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x)[:, 0], labels)}


class FaultyTrainer(Trainer):
    rows: list[int]

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **keywords: Any) -> Any:
        self.rows = [*getattr(self, "rows", []), *inputs["row"].tolist()]
        return super().compute_loss(model, inputs, *rest, **keywords)

    def _save_rng_state(self, output_dir: Any) -> None:
        if "disk" in faults_at(self.state.global_step):
            raise OSError(errno.ENOSPC, f"No space left on device, at start {START}")
        super()._save_rng_state(output_dir)


class Faults(TrainerCallback):
    trainer: FaultyTrainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.rows = []
        end_by_signals(state.global_step + 1)
        for kind in faults_at(state.global_step + 1):
            if kind == "raise":
                raise ValueError(f"a fault of start {START}")
            if kind == "raise the same":
                raise ValueError("a fault that comes again")
            if kind == "hang":
                time.sleep(10_000)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with open(FOLDER / f"steps-{RANK}", "a") as file:
            file.write(json.dumps([START, state.global_step, self.trainer.rows]) + "\n")


class CutFileSystem(LocalFileSystem):
    """A file system for file:// URLs that kills the process after half of a file."""

    def put_file(self, path1: Any, path2: Any, **keywords: Any) -> None:
        step = checkpoint_step(os.path.dirname(path2))
        if step is not None and path2.endswith("optimizer.pt") and "cut upload" in faults_at(step):
            content = Path(path1).read_bytes()
            os.makedirs(os.path.dirname(path2), exist_ok=True)
            Path(path2).write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super().put_file(path1, path2, **keywords)


fsspec.register_implementation("file", CutFileSystem, clobber=True)


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"x": torch.randn(4, generator=generator), "labels": torch.tensor(row / ROWS), "row": torch.tensor(row)}
        for row in range(ROWS)
    ]
    quiet = {"logging_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(PLAN["output_dir"], save_strategy="steps", **quiet, **PLAN["arguments"])
    callback = Faults()
    trainer = FaultyTrainer(Model(PLAN["dropout"]), args, train_dataset=rows, callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    if RANK == 0:
        torch.save(trainer.model.state_dict(), FOLDER / "final.pt")


if __name__ == "__main__":
    main()
