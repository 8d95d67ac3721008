"""How much memory does a hyperparameter search keep from trial to trial?

Trials of a wide two-layer classifier with AdamW, an evaluation after each of three steps. Of each three trials in a row
one is complete, one is pruned, and one fails in its backward pass. The resident set of the process is read after each
trial. A search that kept a model, its gradients or its optimizer would grow by that in each; one that keeps nothing has
in no later trial more than in the first three.
"""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import torch
from torch import nn

from ..benchmark import Benchmark, Case, Measured, Processes
from ..figures import Figures, markdown
from ..jobs import parameters_of
from ..sides import OURS, THEIRS, Side
from ..stopwatch import MIB, resident_bytes
from ..trainings import silenced, trainer_arguments

# Trials after which each way to end has been met once.
FIRST = 3


class Wide(nn.Module):
    """A classifier with two layers of weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.head(torch.relu(self.inner(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that are made when they are read."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((self.width,), float(index % 2)), "labels": torch.tensor(index % 2)}


def measure(side: Side, trials: int, width: int) -> Measured:
    """Resident MiB after the trials, and those of one trial's weights, gradients and AdamW."""
    after = resident_after_trials(side, trials, width)
    return {
        "of_a_trial_mib": 4 * 4 * parameters_of(Wide(width)) / MIB,
        "first_mib": max(after[:FIRST]) / MIB,
        "later_mib": max(after[FIRST:]) / MIB,
        "last_mib": after[-1] / MIB,
    }


def resident_after_trials(side: Side, trials: int, width: int) -> list[int]:
    """The resident set after each trial, in bytes."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    names = importlib.import_module(side.library)
    after: list[int] = []

    class Prunes(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number % 3 == 1 and trial.last_step == 2

    class Fails(names.TrainerCallback):  # type: ignore[name-defined]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer._trial.number % 3 == 2:
                raise RuntimeError("out of memory")

    class Reads(optuna.samplers.RandomSampler):
        def after_trial(self, *arguments: Any) -> None:
            after.append(resident_bytes())

    with tempfile.TemporaryDirectory() as folder, silenced():
        arguments = trainer_arguments(
            names,
            folder,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            eval_strategy="steps",
            eval_steps=1,
            log_level="critical",
        )
        trainer = names.Trainer(
            model_init=lambda: Wide(width),
            args=arguments,
            train_dataset=Rows(width),
            eval_dataset=Rows(width),
            callbacks=[Fails()],
        )
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-3)},
            lambda metrics: metrics["eval_loss"],
            n_trials=trials,
            backend="optuna",
            sampler=Reads(),
            pruner=Prunes(),
            catch=(RuntimeError,),
        )
    return after


def table(figures: Figures) -> str:
    rows = []
    (case,) = figures.cases
    for side in figures.sides(case):
        keys = ("first_mib", "later_mib", "last_mib", "of_a_trial_mib")
        first, later, last, of_a_trial = (figures.median(case, side, key) for key in keys)
        growth = (later - first) / of_a_trial
        rows.append(
            (figures.shown(side), f"{of_a_trial:.0f}", f"{first:.0f}", f"{later:.0f}", f"{last:.0f}", f"{growth:.2f}")
        )
    columns = (
        "side",
        "a trial's tensors, MiB",
        f"largest after the first {FIRST}, MiB",
        "largest later, MiB",
        "after the last, MiB",
        "growth / trial",
    )
    return f"{figures.title(case)}:\n\n" + markdown(columns, rows)


BENCHMARK = Benchmark(
    name="search_memory",
    question="How much memory does a hyperparameter search keep from trial to trial?",
    measure=measure,
    full=(Case("trials", "15 trials", (THEIRS, OURS), {"trials": 15, "width": 2200}, Processes.FRESH),),
    short=(Case("trials", "4 trials", (THEIRS, OURS), {"trials": 4, "width": 16}, Processes.KEPT),),
    rounds=1,
    tables={"search-memory": table},
)
