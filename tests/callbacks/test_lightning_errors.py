"""An error in a Lightning callback says which one it came from, and from which hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from littrainer import Trainer, TrainerCallback
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

BOTH_MODES = pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
EVERY_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}


class FailsInTraining(pl.Callback):
    @rank_zero_only
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.fail()

    def fail(self) -> None:
        raise OverflowError("own")


class FailsInEvaluation(pl.Callback):
    def on_validation_batch_start(self, *_: Any) -> None:
        raise OverflowError("own")


class FailsInSaving(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        raise OverflowError("own")


def fails(*_: Any) -> None:
    raise OverflowError("own")


def notes_of(trainer: Trainer, kind: type[Exception], method: str = "train") -> list[str]:
    with pytest.raises(kind) as error:
        getattr(trainer, method)()
    return getattr(error.value, "__notes__", [])


@BOTH_MODES
@pytest.mark.parametrize(
    ("callback", "where", "step"),
    [
        (FailsInTraining(), "FailsInTraining.on_train_batch_end", 2),
        (FailsInEvaluation(), "FailsInEvaluation.on_validation_batch_start", 1),
        (FailsInSaving(), "FailsInSaving.state_dict", 1),
        (LambdaCallback(on_train_start=fails), "LambdaCallback.on_train_start", 0),
    ],
)
def test_an_error_names_the_callback_its_hook_and_the_optimizer_step(
    tmp_path: Path, kind: Any, callback: Any, where: str, step: int
) -> None:
    given = {"callbacks": [pl.Callback(), callback]}
    trainer = quiet_trainer(
        tmp_path, kind=kind, given=given, max_steps=3, save_strategy="steps", save_steps=1, **EVERY_STEP
    )
    assert notes_of(trainer, OverflowError) == [
        f"It came from the Lightning callback {where}, at optimizer step {step}."
    ]


def test_an_evaluation_outside_of_training_names_it_too(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, given={"callbacks": [FailsInEvaluation()]})
    expected = "It came from the Lightning callback FailsInEvaluation.on_validation_batch_start, at optimizer step 0."
    assert notes_of(trainer, OverflowError, "evaluate") == [expected]


def test_errors_of_others_are_not_put_down_to_a_lightning_callback(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_evaluate(self, *_: Any, **__: Any) -> None:
            raise OverflowError("own")

    trainer = quiet_trainer(tmp_path, given={"callbacks": [pl.Callback(), Failing()]}, max_steps=1, **EVERY_STEP)
    assert notes_of(trainer, OverflowError) == ["It came from the callback Failing.on_evaluate, at optimizer step 1."]

    class FailingModel(VectorClassifier):
        def forward(self, x: Any, labels: Any = None) -> Any:
            raise OverflowError("own")

    trainer = quiet_trainer(tmp_path, FailingModel(), given={"callbacks": [pl.Callback()]}, max_steps=1)
    (note,) = notes_of(trainer, OverflowError)
    assert note.startswith("It came up with a batch of optimizer step 1 of 1: x float32 (4, 6) from ")


@pytest.mark.parametrize(
    ("callback", "kind"),
    [
        (EarlyStopping("val_loss"), RuntimeError),
        (ModelCheckpoint(monitor="val_loss", every_n_epochs=1), Exception),
    ],
)
def test_a_monitored_name_of_plain_lightning_gets_the_trainers_name_for_it(
    tmp_path: Path, callback: Any, kind: type[Exception]
) -> None:
    # A callback of one's own might log it, so that it is not refused before training.
    trainer = quiet_trainer(tmp_path, given={"callbacks": [FailsInTraining(), callback]}, max_steps=1, **EVERY_STEP)
    notes = notes_of(trainer, kind)
    assert type(callback).__name__ in notes[0] and "monitor='eval_loss'" in notes[1]


def test_a_callback_of_ones_own_may_log_the_name_that_is_monitored(tmp_path: Path) -> None:
    class Logging(pl.Callback):
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            module.log("val_own", float(trainer.global_step))

    stopping = EarlyStopping("val_own", patience=1)
    trainer = quiet_trainer(tmp_path, given={"callbacks": [Logging(), stopping]}, num_train_epochs=2, **EVERY_STEP)
    assert trainer.train().global_step == 2 and stopping.best_score.item() == 1.0
