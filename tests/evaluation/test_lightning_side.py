"""How evaluations run on Lightning: what is kept between them, and who hears of single batches."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from littrainer import Trainer, TrainerCallback
from littrainer.engine.module import TrainerModule
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer

ROWS = 5


@pytest.fixture
def handed_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of what Lightning hands to the module, one for each of its steps."""
    kinds: list[str] = []
    for name in ("validation_step", "predict_step"):
        step = getattr(TrainerModule, name)

        def noting(self: Any, batch: Any, batch_idx: int, step: Any = step) -> Any:
            kinds.append(type(batch).__name__)
            return step(self, batch, batch_idx)

        monkeypatch.setattr(TrainerModule, name, noting)
    return kinds


def trainer_over_many_batches(folder: Path, **changes: Any) -> Trainer:
    given = {"eval_dataset": Rows(vector_rows(ROWS, seed=1)), "compute_metrics": accuracy, **changes.pop("given", {})}
    return quiet_trainer(folder, given=given, per_device_eval_batch_size=1, **changes)


def test_batches_that_nobody_listens_to_go_through_lightnings_loop_as_one_step(
    tmp_path: Path, handed_out: list[str]
) -> None:
    trainer = trainer_over_many_batches(tmp_path, max_steps=1, eval_on_start=True)
    predictions = trainer.predict(trainer.eval_dataset).predictions
    assert handed_out == ["WholePass"] and len(predictions) == ROWS
    trainer.evaluate()
    trainer.train()
    assert handed_out == ["WholePass"] * 3


class Listening(pl.Callback):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.heard.append(sorted(batch))

    def on_predict_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        self.heard.append(sorted(batch))


class Deaf(pl.Callback):
    def on_validation_start(self, *_: Any) -> None: ...


def test_a_lightning_callback_that_listens_hears_of_each_batch(tmp_path: Path, handed_out: list[str]) -> None:
    callback = Listening()
    trainer = trainer_over_many_batches(tmp_path, given={"callbacks": [callback]}, max_steps=1, eval_on_start=True)
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    trainer.train()
    assert callback.heard == [["labels", "x"]] * ROWS * 3
    assert handed_out == ["dict"] * ROWS * 3
    handed_out.clear()
    # Further keywords of Lightning bring each batch, a callback without such hooks does not.
    trainer_over_many_batches(tmp_path, lightning={"limit_val_batches": 3}).evaluate()
    trainer_over_many_batches(tmp_path, given={"callbacks": [Deaf()]}).evaluate()
    assert handed_out == [*["dict"] * 3, "WholePass"]


def test_a_signal_ends_an_evaluation_after_its_batch_and_not_after_the_pass(tmp_path: Path) -> None:
    seen: list[int] = []

    class Stopped(Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(len(seen))
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().prediction_step(*args, **kwargs)

    class Terminated(Exception):
        pass

    def terminate(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(Terminated):
            quiet_trainer(tmp_path, kind=Stopped, per_device_eval_batch_size=1).evaluate()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [0, 1, 2]


def test_evaluations_outside_of_training_share_what_lightning_needs_while_model_and_arguments_stay(
    tmp_path: Path,
) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1)
    first = trainer.evaluate()
    kept = trainer.idle_evaluator
    trainer.train()
    assert kept is not None and trainer.lightning_trainer is not kept.lightning_trainer
    assert trainer.evaluate()["eval_loss"] != first["eval_loss"] and trainer.idle_evaluator is kept
    trainer.model = trainer.model_wrapped = VectorClassifier()
    trainer.evaluate()
    assert trainer.idle_evaluator is not kept
    kept = trainer.idle_evaluator
    trainer.args.lightning = {"limit_val_batches": 1}
    trainer.evaluate()
    assert trainer.idle_evaluator is not kept


def test_an_evaluation_inside_another_one_is_one_of_its_own(tmp_path: Path) -> None:
    inner: list[float] = []

    class Evaluating(TrainerCallback):
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            if not inner:
                inner.append(0)
                inner[0] = trainer.evaluate(Rows(vector_rows(4, seed=3)))["eval_loss"]

    trainer = quiet_trainer(tmp_path, given={"callbacks": [Evaluating()]})
    outer = trainer.evaluate()["eval_loss"]
    plain = quiet_trainer(tmp_path)
    assert outer == plain.evaluate()["eval_loss"]
    assert inner == [plain.evaluate(Rows(vector_rows(4, seed=3)))["eval_loss"]]


def test_the_data_of_an_evaluation_is_let_go_of(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path)
    data = Rows(vector_rows(5))
    trainer.evaluate(data)
    trainer.callback_handler.eval_dataloader = None
    gone = weakref.ref(data)
    del data
    gc.collect()
    assert gone() is None
