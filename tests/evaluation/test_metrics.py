from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scenarios.metrics import accuracy
from tests.scenarios.trainers import quiet_trainer

WITH_CHECKPOINTS: dict[str, Any] = {
    "max_steps": 6,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}


class MetricError(Exception):
    """Error of a script."""


def notes_of(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", ()))


def failing_at_call(number: int) -> Any:
    calls: list[int] = []

    def compute_error_rate(prediction: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) == number:
            raise MetricError("division of words")
        return accuracy(prediction)

    return compute_error_rate


def test_an_error_of_the_metric_function_gets_a_note_with_step_and_function(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"compute_metrics": failing_at_call(2)}, **WITH_CHECKPOINTS)
    with pytest.raises(MetricError, match="division of words") as caught:
        trainer.train()
    note = notes_of(caught.value)
    assert "compute_error_rate" in note and "optimizer step 4 of 6" in note and "resume_from_checkpoint=True" in note


def test_outside_of_training_the_note_has_no_step(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"compute_metrics": failing_at_call(1)})
    with pytest.raises(MetricError) as caught:
        trainer.evaluate()
    assert "outside of training" in notes_of(caught.value) and "step" not in notes_of(caught.value)
    assert "given predictions float32 (7, 3), labels int64 (7,)." in notes_of(caught.value)


@pytest.mark.parametrize("returned", [None, [("accuracy", 0.5)]])
def test_metrics_that_are_no_dict_are_refused_with_their_type(tmp_path: Path, returned: Any) -> None:
    def half(_: Any) -> Any:
        return returned

    trainer = quiet_trainer(
        tmp_path, trainer_kwargs={"compute_metrics": half}, eval_strategy="epoch", num_train_epochs=1
    )
    with pytest.raises(TypeError, match=r"half.*returned .*optimizer step 3 of 3.*dict") as caught:
        trainer.train()
    assert type(returned).__name__ in str(caught.value)


def test_a_metric_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"compute_metrics": lambda _: {"all": 0.5, 3: 0.5}})
    with pytest.raises(TypeError, match=r"the name 3 \(an int\).*Names of metrics are texts"):
        trainer.evaluate()


@pytest.mark.parametrize("value", [np.arange(3), {1, 2}], ids=lambda value: type(value).__name__)
def test_a_metric_that_is_not_json_is_refused_at_the_evaluation(tmp_path: Path, value: Any) -> None:
    def report(_: Any) -> dict[str, Any]:
        return {"accuracy": 0.5, "by_class": value}

    trainer = quiet_trainer(tmp_path, trainer_kwargs={"compute_metrics": report}, **WITH_CHECKPOINTS)
    with pytest.raises(TypeError, match=r"report.*'by_class'.*optimizer step 2 of 6.*JSON") as caught:
        trainer.train()
    assert type(value).__name__ in str(caught.value)
