"""A search over a study in a file, in a process that ends itself in the middle of a trial:
`python -m tests.search.killed_search FOLDER TRIAL` ends in trial TRIAL, after its first evaluation."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from littrainer import TrainerCallback
from tests.search.trainers import searched_trainer

N_TRIALS = 5


class EndsItself(TrainerCallback):
    """Kills the process at the first evaluation of a trial."""

    def __init__(self, number: int):
        self.number = number
        self.trial: Any = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trial is not None and self.trial.number == self.number:
            os.kill(os.getpid(), signal.SIGKILL)


def search(folder: Path, storage: Any, ends_in: int | None = None, **keywords: Any) -> Any:
    """Search for a learning rate, a weight decay and a seed, with a seeded sampler that learns from two trials on.

    Parameters:
        folder: the output folder.
        storage: of the study, which is called "killed" and gone on with where it is there.
        ends_in: number of the trial that kills this process.
    """
    import optuna

    ending = EndsItself(-1 if ends_in is None else ends_in)

    def space(trial: Any) -> dict[str, Any]:
        ending.trial = trial
        return {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
            "weight_decay": trial.suggest_float("weight_decay", 0.0, 0.3),
            "seed": trial.suggest_int("seed", 1, 40),
        }

    trainer = searched_trainer(folder, given={"callbacks": [ending]}, eval_strategy="steps", eval_steps=1)
    return trainer.hyperparameter_search(
        space,
        **{
            "n_trials": N_TRIALS,
            "storage": storage,
            "study_name": "killed",
            "load_if_exists": True,
            "sampler": optuna.samplers.TPESampler(seed=11, n_startup_trials=2),
            **keywords,
        },
    )


if __name__ == "__main__":
    place = Path(sys.argv[1])
    search(place / "out", f"sqlite:///{place}/studies.db", int(sys.argv[2]))
