"""Loss scaling in two processes, on the CPU: `python -m tests.distributed.precision_process FOLDER`.

Each process writes its results to `FOLDER/RANK.pickle`.
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
import littrainer.strategies.model_wrapping
from littrainer import Trainer
from littrainer.strategies.full_state import get_full_state_dict
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

RANK = int(os.environ.get("RANK", "0"))
SCALE = 2.0**10
OVERFLOW_STEP = 1
STRATEGIES: dict[str, dict[str, Any]] = {"DDP": {}, "FSDP": {"fsdp": True, "fsdp_config": {"version": 2}}}
TRAININGS = {"scaled": (SCALE, False), "overflow": (SCALE, True)}
LOGGED = ("loss", "grad_norm", "learning_rate")
MODES: dict[str, type[Trainer]] = {"automatic": Trainer, "manual": StepwiseTrainer}


class OverflowsInSingleEntry(VectorClassifier):
    """A model whose last scaled gradient overflows in a single step of process 0; process 1 has the sharded entry."""

    def __init__(self, overflows: bool) -> None:
        super().__init__()
        self.overflows = overflows
        self.steps = 0
        self.extra = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = super().forward(x, labels)
        size = 1e38 if self.overflows and self.training and self.steps == OVERFLOW_STEP and RANK == 0 else 1.0
        outputs["loss"] = outputs["loss"].float() + (self.extra.float() * torch.tensor([1.0, size])).sum()
        self.steps += self.training
        return outputs


def train(folder: Path, kind: type[Trainer], scale: float, overflows: bool, **changes: Any) -> dict[str, Any]:
    """Train five optimizer steps with a scaled loss."""
    torch.manual_seed(0)
    trainer = quiet_trainer(
        folder,
        OverflowsInSingleEntry(overflows),
        kind=kind,
        trainer_kwargs={"train_dataset": Rows(vector_rows(40))},
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


def get_scaled_precision(args: Any) -> str:
    # Scaling only: a forward pass in float16 would change the numbers.
    return "16-mixed"


def enable_scaling_on_the_cpu() -> None:
    """Enable loss scaling on the CPU, without changing the forward pass."""
    littrainer.arguments.destinations.get_lightning_precision = get_scaled_precision
    littrainer.strategies.model_wrapping.get_lightning_precision = get_scaled_precision
    littrainer.strategies.model_wrapping.AUTOCAST_DTYPES["16-mixed"] = torch.float32
    littrainer.arguments.destinations.DERIVED_KEYWORDS["precision"] = (get_scaled_precision, "from fp16")


def main(folder: Path) -> None:
    enable_scaling_on_the_cpu()
    results: dict[str, Any] = {}
    for strategy, changes in STRATEGIES.items():
        for mode, kind in MODES.items():
            for name, (scale, overflows) in TRAININGS.items():
                run_folder = folder / f"{strategy}-{mode}-{name}"
                results[f"{strategy} {mode} {name}"] = train(run_folder, kind, scale, overflows, **changes)
    config = {**STRATEGIES["FSDP"], "fsdp_config": {"version": 2, "ignored_modules": "norm"}}
    try:
        train(folder / "refused", Trainer, SCALE, overflows=False, **config)
    except ValueError as error:
        results["refused"] = str(error)
    # A scale of 1 is no scaling.
    results["plain"] = train(folder / "plain", Trainer, 1.0, overflows=False)
    (folder / f"{RANK}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
