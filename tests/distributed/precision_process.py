"""One of two processes that scale their losses: `python -m tests.distributed.precision_process FOLDER`.

Loss scaling is for GPUs; it is carried out on the CPU here. Each process writes what it found to `FOLDER/RANK.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import littrainer.arguments.destinations
import littrainer.strategies.mixed_precision
from littrainer import Trainer
from littrainer.strategies.full_state import get_full_state_dict
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

RANK = int(os.environ.get("RANK", "0"))
SCALE = 2.0**10
BROKEN_STEP = 1
STRATEGIES: dict[str, dict[str, Any]] = {"DDP": {}, "FSDP": {"fsdp": True, "fsdp_config": {"version": 2}}}
TRAININGS = {"scaled": (SCALE, False), "broken": (SCALE, True)}
LOGGED = ("loss", "grad_norm", "learning_rate")
MODES: dict[str, type[Trainer]] = {"automatic": Trainer, "manual": StepwiseTrainer}


class BreaksInOnePlace(VectorClassifier):
    """In one step of one process a gradient becomes infinite once it is scaled, and only that of a last entry.

    Sharded between two processes, that entry is the second one's.
    """

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.steps = 0
        self.further = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = super().forward(x, labels)
        size = 1e38 if self.breaks and self.training and self.steps == BROKEN_STEP and RANK == 0 else 1.0
        outputs["loss"] = outputs["loss"].float() + (self.further.float() * torch.tensor([1.0, size])).sum()
        self.steps += self.training
        return outputs


def trained(folder: Path, kind: type[Trainer], scale: float, breaks: bool, **changes: Any) -> dict[str, Any]:
    """Five optimizer steps with a scaled loss."""
    torch.manual_seed(0)
    trainer = quiet_trainer(
        folder,
        BreaksInOnePlace(breaks),
        kind=kind,
        given={"train_dataset": Rows(vector_rows(40))},
        optim="sgd",
        num_train_epochs=1,
        max_grad_norm=0.5,
        logging_strategy="steps",
        logging_steps=1,
        **changes,
    )
    trainer.accelerator._scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    trainer.train()
    scaler: Any = trainer.accelerator.scaler
    state = get_full_state_dict(trainer.model) if "fsdp" in changes else trainer.model.state_dict()
    return {
        "values": {name: [log[name] for log in trainer.state.log_history if name in log] for name in LOGGED},
        "scale": scaler.get_scale(),
        "weights": {name: value.clone() for name, value in state.items()},
        "plugin": type(trainer.lightning_trainer.precision_plugin).__name__ if trainer.lightning_trainer else "",
    }


def scaled_precision(args: Any) -> str:
    # Only the scaling is asked for: a forward pass in float16 would be another thing to compare.
    return "16-mixed"


def scale_on_the_cpu() -> None:
    """Let the arguments ask for loss scaling, though the device is a CPU, and forward passes stay as they are."""
    littrainer.arguments.destinations.get_lightning_precision = scaled_precision
    littrainer.strategies.mixed_precision.get_lightning_precision = scaled_precision
    littrainer.strategies.mixed_precision.AUTOCAST_DTYPES["16-mixed"] = torch.float32
    littrainer.arguments.destinations.DERIVED_KEYWORDS["precision"] = (scaled_precision, "from fp16")


def main(folder: Path) -> None:
    scale_on_the_cpu()
    found: dict[str, Any] = {}
    for strategy, changes in STRATEGIES.items():
        for mode, kind in MODES.items():
            for name, (scale, breaks) in TRAININGS.items():
                own = folder / f"{strategy}-{mode}-{name}"
                found[f"{strategy} {mode} {name}"] = trained(own, kind, scale, breaks, **changes)
    config = {**STRATEGIES["FSDP"], "fsdp_config": {"version": 2, "ignored_modules": "norm"}}
    try:
        trained(folder / "refused", Trainer, SCALE, breaks=False, **config)
    except ValueError as error:
        found["refused"] = str(error)
    # A scale of 1 that never grows is no scaling at all.
    found["plain"] = trained(folder / "plain", Trainer, 1.0, breaks=False)
    (folder / f"{RANK}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
