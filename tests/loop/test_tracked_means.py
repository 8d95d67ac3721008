from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import littrainer
from littrainer import Trainer, TrainerCallback
from littrainer.loop.tracked_means import TrackedMeans
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer


class TrackingTrainer(Trainer):
    """A Trainer that tracks the number of each call of compute_loss."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.calls += 1
        self.track("call", torch.tensor(float(self.calls)))
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


class TrackingClassifier(VectorClassifier):
    def forward(self, x: Any, labels: Any = None) -> Any:
        littrainer.track("rows", len(x))
        return super().forward(x, labels)


class HalfOfSteps(TrainerCallback):
    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 2:
            self.trainer.track("odd step", state.global_step)


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry and "loss" in entry]


def test_a_tracked_value_is_logged_as_its_mean_since_the_last_log(tmp_path: Path) -> None:
    callback = HalfOfSteps()
    trainer = quiet_trainer(
        tmp_path,
        TrackingClassifier(),
        kind=TrackingTrainer,
        rows=10,
        trainer_kwargs={"callbacks": [callback]},
        max_steps=4,
        gradient_accumulation_steps=2,
        logging_strategy="steps",
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    callback.trainer = trainer
    trainer.train()
    # Ten rows are micro-batches of 4, 4 and 2, in windows of two and of one; evaluations in between do not count.
    assert logged(trainer, "rows") == pytest.approx([10 / 3, 10 / 3])
    assert [entry["odd step"] for entry in trainer.state.log_history if "odd step" in entry] == [1.0, 3.0]
    first, second = logged(trainer, "call")
    assert first == pytest.approx(5 / 3) or first < second
    littrainer.track("rows", 1)  # outside of a training nothing happens


def test_sums_are_computed_on_the_device_without_gradients() -> None:
    means = TrackedMeans()
    weight = torch.ones((), requires_grad=True)
    means.add("a", weight * 3)
    means.add("a", 1)
    means.add("b", torch.tensor([2]))
    assert not any(isinstance(total, torch.Tensor) and total.requires_grad for total in means._sums.values())
    assert means.take(torch.device("cpu")) == {"a": 2.0, "b": 2.0}
    assert means.take(torch.device("cpu")) == {}


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("loss", 1.0, ValueError, "choose another name"),
        ("train_loss", 1.0, ValueError, "choose another name"),
        ("speed/data", 1.0, ValueError, "choose another name"),
        ("eval_part", 1.0, ValueError, "choose another name"),
        ("part", torch.ones(2), TypeError, r"a Tensor, and takes one number: its mean\(\)"),
        ("part", "much", TypeError, "takes one number"),
    ],
)
def test_a_value_that_cannot_be_logged_is_refused(name: Any, value: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        TrackedMeans().add(name, value)
