"""Callbacks in the trials of a search: pruning, checkpoints, early ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optuna
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from littrainer import TrainerCallback
from tests.search.trainers import rate_space, searched_trainer

EVALUATED: dict[str, Any] = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1}


class PrunesFromTheTrainer(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.trial_params["learning_rate"] < 0.01 and state.global_step == 3:
            raise optuna.TrialPruned("too slow")


class PrunesFromLightning(pl.Callback):
    """A callback like optuna-integration's for Lightning."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if max(rates) < 0.01 and batch_idx == 2:
            raise optuna.TrialPruned("too slow")


def search_rates(trainer: Any, *rates: float) -> Any:
    """Return the study after a trial with each learning rate."""
    study = optuna.create_study(study_name="search", storage=(storage := optuna.storages.InMemoryStorage()))
    for rate in rates:
        study.enqueue_trial({"learning_rate": rate})
    trainer.hyperparameter_search(
        rate_space, n_trials=len(rates), backend="optuna", storage=storage, study_name="search", load_if_exists=True
    )
    return study


@pytest.mark.parametrize("kind", [PrunesFromTheTrainer, PrunesFromLightning])
def test_a_callback_may_prune_a_trial(tmp_path: Path, kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    study = search_rates(
        searched_trainer(tmp_path, trainer_kwargs={"callbacks": [kind()]}, **EVALUATED), 0.02, 0.001, 0.03
    )
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert "Traceback" not in capsys.readouterr().err


def test_a_lightning_model_checkpoint_saves_the_best_of_each_trial(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path / "best", monitor="eval_loss", save_top_k=1, filename="best")
    trainer = searched_trainer(tmp_path, trainer_kwargs={"callbacks": [saving]}, **EVALUATED)
    paths: list[str] = []

    class PathRecorder(TrainerCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            paths.append(saving.best_model_path)

    trainer.add_callback(PathRecorder())
    search_rates(trainer, 0.02, 0.001)
    assert len(set(paths)) == 2
    assert all(Path(path).exists() for path in paths)
    assert saving.best_model_path == ""
