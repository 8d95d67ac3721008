from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.models import BreakingClassifier, VectorClassifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


def test_an_epoch_without_any_batch_ends_the_training_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class OnlyOnce(Stream):
        done = False

        def __iter__(self) -> Any:
            rows, self.done = [] if self.done else self.rows, True
            return iter([dict(row) for row in rows])

    trainer = quiet_trainer(tmp_path, given={"train_dataset": OnlyOnce(vector_rows(8))}, max_steps=5)
    assert trainer.train().global_step == 2
    assert "no batch in this epoch" in caplog.text and "step 2 of 5" in caplog.text


def test_state_and_control_of_a_second_training_start_anew(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.train()
    first = trainer.state
    trainer.train()
    assert trainer.state is not first
    assert trainer.state.global_step == 2 and len(trainer.state.log_history) == len(first.log_history)


def test_a_model_init_makes_a_model_optimizer_and_schedule_for_each_training(tmp_path: Path) -> None:
    trainer = Trainer(
        model_init=lambda: VectorClassifier(),
        args=quiet_arguments(tmp_path, max_steps=1),
        train_dataset=Rows(vector_rows(4)),
    )
    parts = []
    for _ in range(2):
        trainer.train()
        parts.append((trainer.model, trainer.optimizer, trainer.lr_scheduler))
    assert all(one is not other for one, other in zip(*parts, strict=True))
    assert trainer.callback_handler.model is trainer.model
    first, second = (model.state_dict() for model, _, _ in parts)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_argument_set_after_construction_is_refused_when_training_begins(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.args.debug = "tpu_metrics_debug"
    with pytest.raises(NotImplementedError, match=r"debug=.*tpu_metrics_debug"):
        trainer.train()
    assert not trainer.is_in_train


def test_one_checkpoint_only_is_the_best_one_once_training_has_ended(tmp_path: Path) -> None:
    losses = iter([3.0, 1.0, 2.0, 2.5])

    def falling_then_rising(_: Any) -> dict[str, float]:
        return {"badness": next(losses)}

    trainer = quiet_trainer(
        tmp_path,
        given={"compute_metrics": falling_then_rising},
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="badness",
        greater_is_better=False,
    )
    trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


def test_a_loss_that_was_no_number_does_not_stop_training(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path, BreakingClassifier(broken=(1,)), max_steps=3, logging_strategy="steps", logging_steps=1
    )
    output = trainer.train()
    assert output.global_step == 3 and output.training_loss == output.training_loss
