"""Scripts that search, as written for transformers, run unchanged with the numbers that they have there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compat.processes import run_python

SCRIPT = """
import gc
import json
import sys

import optuna
import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
from transformers.hyperparameter_search import (
    ALL_HYPERPARAMETER_SEARCH_BACKENDS,
    HyperParamSearchBackendBase,
    OptunaBackend,
    default_hp_search_backend,
)
from transformers.integrations import hp_params, is_optuna_available, run_hp_search_optuna
from transformers.trainer_utils import BestRun, HPSearchBackend, default_compute_objective, default_hp_space_optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
# Each training collects garbage, which takes longer than it where all libraries are gone through.
gc.freeze()


class Regression(nn.Module):
    def __init__(self, hidden=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x, labels=None):
        predicted = self.layers(x).squeeze(-1)
        return {"loss": ((predicted - labels) ** 2).mean(), "logits": predicted}


seen = []


class Mine(Trainer):
    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        # As sentence-transformers' Trainer makes its loss anew around each model.
        self.scale = nn.Parameter(torch.ones(()))
        model.scale = self.scale
        return model

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs["loss"] * model.scale.exp()
        return (loss, outputs) if return_outputs else loss

    def _report_to_hp_search(self, trial, step, metrics):
        seen.append([getattr(trial, "number", None), step, self.state.is_hyper_param_search, self.state.trial_params])
        super()._report_to_hp_search(trial, step, metrics)


torch.manual_seed(7)
rows = [{"x": torch.randn(3), "labels": torch.randn(())} for _ in range(12)]


def model_init(trial):
    return Regression(4 if trial is None else trial.suggest_int("hidden", 2, 6))


def space(trial):
    return {"learning_rate": trial.suggest_categorical("learning_rate", [0.003, 0.03])}


def make(output_dir):
    args = TrainingArguments(
        output_dir, max_steps=6, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2, logging_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True, metric_for_best_model="loss",
        report_to="none", disable_tqdm=True, use_cpu=True,
    )
    return Mine(args=args, model_init=model_init, train_dataset=rows, eval_dataset=rows[:5],
                callbacks=[EarlyStoppingCallback(2)])


class Second(optuna.pruners.BasePruner):
    def prune(self, study, trial):
        return trial.number == 1 and trial.last_step == 4


grid = optuna.samplers.GridSampler({"hidden": [2, 6], "learning_rate": [0.003, 0.03]}, seed=1)
trainer = make("out")
best = trainer.hyperparameter_search(
    hp_space=space, n_trials=4, direction="minimize", backend="optuna", sampler=grid,
    pruner=Second(),
)
assert isinstance(best, BestRun) and best.run_summary is None
assert trainer.hp_search_backend is None and trainer.hp_space is space
found = {"home": Trainer.__module__, "best": [best.run_id, best.objective, best.hyperparameters], "seen": seen}


class Ladder(HyperParamSearchBackendBase):
    name = "ladder"

    @staticmethod
    def is_available():
        return True

    def run(self, trainer, n_trials, direction, **kwargs):
        runs = []
        for number in range(n_trials):
            rate = kwargs["lowest"] * 10**number
            trainer.objective = None
            trainer.args.learning_rate = rate
            trainer.train()
            runs.append(BestRun(str(number), trainer.compute_objective(trainer.evaluate()), {"learning_rate": rate}))
        return min(runs, key=lambda run: run.objective)

    def default_hp_space(self, trial):
        return {}


def own_backend():
    # One of the three names has to be given up for it: a search takes no others.
    ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.WANDB] = Ladder
    return make("ladder").hyperparameter_search(n_trials=3, backend="wandb", lowest=0.001)


found["own backend"] = list(own_backend())
found["default"] = default_hp_search_backend()
found["space"] = default_hp_space_optuna(optuna.trial.FixedTrial(
    {"learning_rate": 1e-5, "num_train_epochs": 2, "seed": 3, "per_device_train_batch_size": 8}))
found["objective"] = [default_compute_objective({"eval_loss": 0.5, "epoch": 1.0, "eval_runtime": 2.0}),
                      default_compute_objective({"eval_loss": 0.5, "eval_f1": 0.25, "eval_accuracy": 0.5})]
found["parameters"] = [hp_params({"a": 1}), hp_params(optuna.trial.FixedTrial({"b": 2}))]
found["available"] = is_optuna_available() and OptunaBackend.is_available()
print(json.dumps(found))
"""


def said_by(folder: Path, *command: str, script: str) -> tuple[dict[str, Any], str]:
    (folder / "search.py").write_text(script, encoding="utf-8")
    done = run_python(*command, "search.py", cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], Path, str]]:
    """What the script says, where and with what messages: with transformers' own Trainer, and with ours."""
    found = []
    for command in ([], ["-m", "littrainer", "run"]):
        folder = tmp_path_factory.mktemp("search")
        said, told = said_by(folder, *command, script=SCRIPT)
        found.append((said, folder, told))
    return found


def test_a_script_with_a_subclass_and_a_backend_of_its_own_finds_what_it_finds_with_transformers(both: Any) -> None:
    (theirs, _, _), (ours, _, _) = both
    assert (theirs.pop("home"), ours.pop("home")) == ("transformers.trainer", "littrainer.trainer")
    assert ours == theirs
    reported = [(number, step) for number, step, *_ in ours["seen"] if number is not None]
    assert len({number for number, _ in reported}) == 4
    assert [step for number, step in reported if number == 1] == [2, 4], "the second trial was to be pruned"
    assert ours["own backend"][0] in ("0", "1", "2")


def test_trials_leave_the_folders_that_they_leave_with_transformers(both: Any) -> None:
    (_, theirs, _), (_, ours, _) = both
    left = [sorted(path.name for path in folder.glob("out/run-*")) for folder in (theirs, ours)]
    assert left[0] == left[1] == [f"run-{number}" for number in range(4)]
    for run in left[1]:
        states = [_states(folder / "out" / run) for folder in (theirs, ours)]
        assert states[0] == states[1]


def _states(folder: Path) -> dict[str, Any]:
    found = {}
    for path in folder.glob("*/trainer_state.json"):
        state = json.loads(path.read_text())
        state["log_history"] = [
            {name: value for name, value in entry.items() if not name.endswith(("runtime", "per_second"))}
            for entry in state["log_history"]
        ]
        found[path.parent.name] = state
    return found
