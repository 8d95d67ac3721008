"""What a user's own code raises reaches the user as it is, and leaves a Trainer that can train again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import TrainerCallback
from tests.faults.failing import PLACES, Fuse, in_event
from tests.scenarios.trainers import quiet_trainer


class OwnError(Exception):
    """An error with a constructor that nothing but the user can call."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}: {detail}")


def is_at_rest(trainer: Any) -> bool:
    """Whether nothing of an interrupted training is left."""
    return (
        not trainer.is_in_train
        and trainer.lightning_module is None
        and trainer.accelerator.module is None
        and torch.is_grad_enabled()
    )


@pytest.mark.parametrize("place", PLACES)
def test_an_error_is_raised_unchanged_and_training_can_restart(tmp_path: Path, place: str) -> None:
    error = OwnError(7, detail="out of ink")
    trainer = PLACES[place](tmp_path, Fuse(error))
    with pytest.raises(OwnError) as caught:
        trainer.train()
    assert caught.value is error and str(caught.value) == "code 7: out of ink"
    assert caught.value.__cause__ is None and caught.value.__suppress_context__ is False
    assert is_at_rest(trainer)
    output = trainer.train()
    assert output.global_step == 3 and is_at_rest(trainer)
    assert {"eval_loss"} <= set(trainer.evaluate())


@pytest.mark.parametrize("place", ["forward", "on_step_end", "on_evaluate"])
def test_an_error_does_not_change_the_next_trainings_numbers(tmp_path: Path, place: str) -> None:
    logs = []
    for error in (None, OwnError(1, detail="")):
        trainer = PLACES[place](tmp_path, Fuse(error), logging_steps=1)
        start = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        if error is not None:
            with pytest.raises(OwnError):
                trainer.train()
            trainer.optimizer = trainer.lr_scheduler = None
            trainer.model.load_state_dict(start)
        trainer.train()
        logs.append(
            [(log["step"], log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
        )
    assert logs[0] == logs[1] and len(logs[0]) == 3


@pytest.mark.parametrize("error", [OwnError(2, detail=""), KeyboardInterrupt("stop"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end", "on_save"])
def test_errors_and_interrupts_at_start_or_end_are_raised(tmp_path: Path, event: str, error: BaseException) -> None:
    trainer = in_event(event)(tmp_path, Fuse(error, at_call=1), save_strategy="steps")
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error and is_at_rest(trainer)
    assert trainer.train().global_step == 3


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_an_error_in_a_separate_evaluation_is_raised(tmp_path: Path, method: str) -> None:
    error = OwnError(3, detail="")
    trainer = in_event("on_prediction_step")(tmp_path, Fuse(error))
    arguments = [trainer.eval_dataset] if method == "predict" else []
    with pytest.raises(OwnError) as caught:
        getattr(trainer, method)(*arguments)
    assert caught.value is error and is_at_rest(trainer)
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
    trainer = quiet_trainer(tmp_path, given={"callbacks": [callback]}, max_steps=3)
    assert trainer.train().global_step == 3 and callback.failed == 3
