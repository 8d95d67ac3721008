"""Errors of user code, which are raised unchanged and leave a Trainer that can train again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import TrainerCallback
from tests.faults.failing import FAILURES, Fuse, fail_in_event
from tests.scenarios.trainers import quiet_trainer


class CustomError(Exception):
    """An error that cannot be reconstructed from its arguments."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}: {detail}")


def is_reset(trainer: Any) -> bool:
    """Return whether no state of a training remains."""
    return (
        not trainer.is_in_train
        and trainer.lightning_module is None
        and trainer.accelerator.module is None
        and torch.is_grad_enabled()
    )


@pytest.mark.parametrize("place", FAILURES)
def test_an_error_is_raised_unchanged_and_training_can_restart(tmp_path: Path, place: str) -> None:
    error = CustomError(7, detail="out of ink")
    trainer = FAILURES[place](tmp_path, Fuse(error))
    with pytest.raises(CustomError) as caught:
        trainer.train()
    assert caught.value is error and str(caught.value) == "code 7: out of ink"
    assert caught.value.__cause__ is None and caught.value.__suppress_context__ is False
    assert is_reset(trainer)
    output = trainer.train()
    assert output.global_step == 3 and is_reset(trainer)
    assert {"eval_loss"} <= set(trainer.evaluate())


@pytest.mark.parametrize("place", ["forward", "on_step_end", "on_evaluate"])
def test_an_error_does_not_change_the_next_trainings_numbers(tmp_path: Path, place: str) -> None:
    logs = []
    for error in (None, CustomError(1, detail="")):
        trainer = FAILURES[place](tmp_path, Fuse(error), logging_steps=1)
        start = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        if error is not None:
            with pytest.raises(CustomError):
                trainer.train()
            trainer.optimizer = trainer.lr_scheduler = None
            trainer.model.load_state_dict(start)
        trainer.train()
        logs.append(
            [(log["step"], log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
        )
    assert logs[0] == logs[1] and len(logs[0]) == 3


@pytest.mark.parametrize("error", [CustomError(2, detail=""), KeyboardInterrupt("stop"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end", "on_save"])
def test_errors_and_interrupts_at_start_or_end_are_raised(tmp_path: Path, event: str, error: BaseException) -> None:
    trainer = fail_in_event(event)(tmp_path, Fuse(error, at_call=1), save_strategy="steps")
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error and is_reset(trainer)
    assert trainer.train().global_step == 3


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_an_error_in_a_separate_evaluation_is_raised(tmp_path: Path, method: str) -> None:
    error = CustomError(3, detail="")
    trainer = fail_in_event("on_prediction_step")(tmp_path, Fuse(error))
    arguments = [trainer.eval_dataset] if method == "predict" else []
    with pytest.raises(CustomError) as caught:
        getattr(trainer, method)(*arguments)
    assert caught.value is error and is_reset(trainer)
    getattr(trainer, method)(*arguments)
    assert trainer.train().global_step == 3


def test_an_error_that_a_callback_handles_itself_does_not_end_training(tmp_path: Path) -> None:
    class Evaluating(TrainerCallback):
        failed = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            try:
                trainer.evaluate(["no", "samples"])
            except Exception:
                self.failed += 1

    callback = Evaluating()
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [callback]}, max_steps=3)
    assert trainer.train().global_step == 3 and callback.failed == 3
