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


# ---- Loss terms of a model or of `compute_loss` (`log_loss_terms`) ---------------------------------------------------

SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
    "logging_strategy": "steps",
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
}


class Segmenter(VectorClassifier):
    """A model with loss terms, one of them in a dict, and with outputs that are none."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = super().forward(x, labels)
        rows = torch.tensor(float(len(x)))
        return {
            **outputs,
            "aux_loss": rows,
            "loss_dict": {"loss_mask": 2 * rows, "loss": rows, "cardinality_error": rows},
            "loss_of_each_row": torch.ones(len(x)),
            "loss_count": torch.tensor(3),
            "z_loss": None,
        }


def entries(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_terms_of_a_model_are_logged_as_means_over_micro_batches(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, Segmenter(), rows=10, log_loss_terms=True, **SETTINGS)
    trainer.train()
    # Ten rows are micro-batches of 4, 4 and 2, in windows of two and of one.
    assert entries(trainer, "aux_loss") == pytest.approx([10 / 3, 10 / 3])
    assert entries(trainer, "loss_mask") == pytest.approx([20 / 3, 20 / 3])
    # Seven rows are batches of 3, 3 and 1, and each row counts once, as in eval_loss.
    assert entries(trainer, "eval_aux_loss") == pytest.approx([19 / 7])
    assert entries(trainer, "eval_loss_mask") == pytest.approx([38 / 7])
    logged = {name for entry in trainer.state.log_history for name in entry}
    assert {name for name in logged if "loss" in name} == {
        *("loss", "aux_loss", "loss_mask", "eval_loss", "eval_aux_loss", "eval_loss_mask", "train_loss"),
    }
    assert trainer.evaluate(metric_key_prefix="other")["other_aux_loss"] == pytest.approx(19 / 7)


def test_without_the_argument_nothing_is_added_and_losses_are_the_same(tmp_path: Path) -> None:
    curves = []
    for is_logged in (True, False):
        torch.manual_seed(0)
        trainer = quiet_trainer(tmp_path, Segmenter(), log_loss_terms=is_logged, **SETTINGS)
        trainer.train()
        curves.append([entries(trainer, name) for name in ("loss", "eval_loss", "train_loss", "grad_norm")])
    assert curves[0] == curves[1] and not entries(trainer, "aux_loss") and not entries(trainer, "eval_aux_loss")


class ReturnsTerms(Trainer):
    """A Trainer whose `compute_loss` returns its terms with the outputs, or in a dict that replaces the loss."""

    names = ("loss", "dice_loss")
    returns_dict = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        dice = outputs["loss"] * 0.25
        terms = dict(zip(self.names, (outputs["loss"] + dice, dice), strict=True))
        if self.returns_dict:
            return terms
        return (terms["loss"], terms) if return_outputs else terms["loss"]


class ReturnsDict(ReturnsTerms):
    returns_dict = True


class ReturnsNoLoss(ReturnsDict):
    names = ("total", "dice_loss")


@pytest.mark.parametrize("kind", [ReturnsTerms, ReturnsDict])
def test_terms_that_compute_loss_returns_are_logged(tmp_path: Path, kind: type[Trainer]) -> None:
    trainer = quiet_trainer(tmp_path, kind=kind, log_loss_terms=True, **{**SETTINGS, "gradient_accumulation_steps": 1})
    trainer.train()
    for prefix, number in (("", 2), ("eval_", 1)):
        losses, terms = entries(trainer, f"{prefix}loss"), entries(trainer, f"{prefix}dice_loss")
        assert len(terms) == number and [5 * term for term in terms] == pytest.approx(losses, rel=1e-5)


def test_a_dict_without_loss_is_refused_with_its_names(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="returned a dict with 'total', 'dice_loss': add the sum as 'loss'"):
        quiet_trainer(tmp_path, kind=ReturnsNoLoss, log_loss_terms=True, **SETTINGS).train()


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda model, inputs, **kwargs: (model(**inputs)["loss"], {}, 3), "a tuple of 3, and log_loss"),
        (
            lambda model, inputs, num_items_in_batch=None: model(**inputs)["loss"],
            "add return_outputs=False to its parameters",
        ),
        (
            lambda model, inputs, **kwargs: {"loss": model(**inputs)["loss"], "train_loss": torch.ones(())},
            "log_loss_terms=True cannot log 'train_loss', .*: rename this output",
        ),
    ],
)
def test_terms_that_cannot_be_logged_are_refused(tmp_path: Path, function: Any, match: str) -> None:
    trainer = quiet_trainer(tmp_path, log_loss_terms=True, **SETTINGS)
    trainer.compute_loss = function
    with pytest.raises((TypeError, ValueError), match=match):
        trainer.train()


def test_a_tracked_value_replaces_the_term_of_its_name(tmp_path: Path) -> None:
    class TracksTheTerm(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.track("aux_loss", 0.5)
            return super().compute_loss(*args, **kwargs)

    trainer = quiet_trainer(tmp_path, Segmenter(), kind=TracksTheTerm, log_loss_terms=True, **SETTINGS)
    trainer.train()
    assert entries(trainer, "aux_loss") == [0.5, 0.5] and entries(trainer, "eval_aux_loss") == pytest.approx([19 / 7])


def test_terms_of_a_failed_evaluation_do_not_count_in_the_next(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, Segmenter(), log_loss_terms=True)
    step, calls = trainer.prediction_step, []

    def fail_at_the_second_batch(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no connection")
        return step(*args, **kwargs)

    trainer.prediction_step = fail_at_the_second_batch
    with pytest.raises(OSError, match="no connection"):
        trainer.evaluate()
    assert trainer.evaluate()["eval_aux_loss"] == pytest.approx(19 / 7)
