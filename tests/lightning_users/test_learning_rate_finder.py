"""`trainer.lr_find()`: its results, and that it restores the Trainer."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

from littrainer import Trainer, TrainerCallback, set_seed
from littrainer.data.resume.rng import get_rng_states
from littrainer.lightning.lightning_extras import RangeTest
from tests.fidelity.first_difference import first_difference
from tests.scenarios.data import Rows
from tests.scenarios.models import NoisyClassifier, VectorClassifier, tiny_llama
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

FALLING = [math.exp(-((max(step - 20, 0) / 10) ** 2)) for step in range(40)]


# ---- Results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exponential", "linear"])
def test_rates_rise_from_the_lowest_to_the_highest(tmp_path: Path, mode: str) -> None:
    used: list[float] = []

    class RecordingSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            used.append(self.param_groups[0]["lr"])
            assert {group["lr"] for group in self.param_groups} == {used[-1]}
            return loss

    options = {"optimizer_cls_and_kwargs": (RecordingSGD, {"lr": 1.0})}
    trainer = quiet_trainer(tmp_path, trainer_kwargs=options, gradient_accumulation_steps=2, rows=20)
    result = trainer.lr_find(min_lr=1e-4, max_lr=1e-2, num_training=5, mode=mode)
    expected = [1e-4 * 10 ** (step / 2) for step in range(5)] if mode == "exponential" else np.linspace(1e-4, 1e-2, 5)
    assert used == result.results["lr"] == pytest.approx(list(expected)) and len(result.results["loss"]) == 5


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
def test_losses_are_the_running_mean_of_a_trainings_losses(tmp_path: Path, kind: type[Trainer]) -> None:
    changes: dict[str, Any] = {
        "optim": "sgd",
        "gradient_accumulation_steps": 3,
        "kind": kind,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "learning_rate": 1e-12,
        "num_train_epochs": 2,
    }
    result = quiet_trainer(tmp_path, rows=20, **changes).lr_find(1e-12, 1.1e-12, num_training=4).results["loss"]
    trainer = quiet_trainer(tmp_path, rows=20, **changes)
    trainer.train()
    mean, weights, expected = 0.0, 0.0, []
    for loss in [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]:
        mean, weights = 0.98 * mean + 0.02 * loss, 0.98 * weights + 0.02
        expected.append(mean / weights)
    assert result == pytest.approx(expected, rel=1e-5) and len(set(result)) == 4


def test_the_suggestion_is_the_steepest_rate_and_ignores_noise_and_ends() -> None:
    rates = [1e-6 * 1.5**step for step in range(40)]
    steepest = min(range(1, 39), key=lambda step: FALLING[step + 1] - FALLING[step - 1])
    result = RangeTest("exponential", rates, FALLING).suggestion()
    assert result == rates[steepest]
    # A jump at the first step and at the last, and a loss of nan.
    disturbed = [9.0, *FALLING[1:-1], -9.0]
    disturbed[12] = math.nan
    assert RangeTest("exponential", rates, disturbed).suggestion() == rates[steepest]


def test_too_few_steps_suggest_nothing_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert RangeTest("linear", [0.1] * 12, [1.0] * 12).suggestion() is None
    assert "12 steps that were tried 1 are left to compare" in caplog.text and "num_training" in caplog.text
    assert RangeTest("linear", [0.1, 0.2, 0.3], [1.0, 0.5, 0.4]).suggestion(skip_begin=0, skip_end=0) == 0.1


def test_the_test_ends_at_a_loss_of_nan(tmp_path: Path) -> None:
    class NanModel(VectorClassifier):
        steps = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            self.steps += self.training
            outputs = super().forward(x, labels)
            return {**outputs, "loss": outputs["loss"] * math.nan} if self.steps == 15 else outputs

    result = quiet_trainer(tmp_path, NanModel()).lr_find(num_training=30)
    assert [math.isnan(loss) for loss in result.results["loss"]] == [False] * 14 + [True]
    assert result.suggestion() is not None


def test_fast_dev_run_tries_a_single_rate(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, lightning={"fast_dev_run": True})
    result = trainer.lr_find()
    assert result.results["lr"] == [1e-8] and result.suggestion() is None


# ---- The plot --------------------------------------------------------------------------------------------------------


def test_the_plot_draws_the_curve_and_marks_the_suggestion() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    rates = [1e-6 * 1.5**step for step in range(40)]
    result = RangeTest("exponential", rates, FALLING)
    figure = result.plot(suggest=True)
    (axes,) = figure.axes
    curve, mark = axes.lines
    assert list(curve.get_xdata()) == rates and list(curve.get_ydata()) == FALLING
    assert list(mark.get_xdata()) == [result.suggestion()]
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "learning rate", "loss")
    pyplot.close("all")


# ---- Restoring the Trainer -------------------------------------------------------------------------------------------


class StepCounter(TrainerCallback):
    def __init__(self) -> None:
        self.events = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.events += 1


class BatchCounter(pl.Callback):
    batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


def make_prepared_trainer(folder: Path, is_trained: bool) -> Trainer:
    torch.manual_seed(3)
    model = NoisyClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    flat = [LambdaLR(optimizer, lambda step: 1 / (step + 1)) for _ in range(2)]
    options: dict[str, Any] = {
        "optimizers": (optimizer, SequentialLR(optimizer, flat, [3])),
        "callbacks": [StepCounter(), BatchCounter()],
    }
    trainer = quiet_trainer(
        folder, model, trainer_kwargs=options, rows=20, max_steps=4, logging_strategy="steps", logging_steps=1
    )
    if is_trained:
        trainer.train()
    return trainer


def capture_state(trainer: Trainer, folder: Path) -> dict[str, Any]:
    model: Any = trainer.model
    schedule: Any = trainer.lr_scheduler
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [copy.deepcopy(parameter.grad) for parameter in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "optimizer": copy.deepcopy(trainer.optimizer.state_dict()),
        "schedule": copy.deepcopy({**vars(schedule), "optimizer": None, "_schedulers": None}),
        "schedules inside": [copy.deepcopy(part.state_dict()) for part in schedule._schedulers],
        "arguments": copy.copy(vars(trainer.args)),
        "state": copy.deepcopy(vars(trainer.state)),
        "control": copy.copy(vars(trainer.control)),
        "callbacks": [list(trainer.callback_handler.callbacks), list(trainer.lightning_callbacks)],
        "calls": [trainer.callback_handler.callbacks[1].events, trainer.lightning_callbacks[0].batches],
        "files": sorted(folder.rglob("*")),
        "attributes": {name: id(value) for name, value in vars(trainer).items()},
    }


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_trainer_is_restored(tmp_path: Path, is_trained: bool) -> None:
    trainer = make_prepared_trainer(tmp_path, is_trained)
    trainer.model.eval()
    trainer.model.head.weight.grad = torch.ones_like(trainer.model.head.weight)
    random.seed(5)
    np.random.seed(6)
    before, generators = capture_state(trainer, tmp_path), get_rng_states(gpu=False)
    trainer.lr_find(num_training=12)
    trainer.scale_batch_size(steps_per_trial=1)
    assert first_difference(get_rng_states(gpu=False), generators) is None
    after = capture_state(trainer, tmp_path)
    for name, value in before.items():
        if name in ("weights", "gradients", "optimizer"):
            torch.testing.assert_close(after[name], value, rtol=0, atol=0)
        else:
            assert after[name] == value, name
    histories = []
    for candidate in (trainer, make_prepared_trainer(tmp_path / "another", is_trained)):
        candidate.model.train()
        set_seed(1)
        candidate.train()
        history = candidate.state.log_history
        histories.append([(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry])
    assert histories[0] == histories[1] and len(histories[0]) == 4


def test_the_trainer_is_restored_after_an_error(tmp_path: Path) -> None:
    class Failing(Trainer):
        fails = True

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.fails and self.state.global_step == 2:
                raise ZeroDivisionError
            return super().compute_loss(*args, **kwargs)

    trainer = quiet_trainer(tmp_path, kind=Failing, max_steps=3)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ZeroDivisionError):
        trainer.lr_find()
    assert not trainer.is_in_train and trainer.optimizer is None and trainer.args.max_steps == 3
    torch.testing.assert_close(dict(trainer.model.state_dict()), before, rtol=0, atol=0)
    trainer.fails = False
    assert trainer.train().global_step == 3


def test_gradient_checkpointing_of_a_model_of_transformers_is_restored(tmp_path: Path) -> None:
    model = tiny_llama()
    rows = [{"input_ids": [7, 8, 9], "labels": [7, 8, 9]}] * 8

    def get_hooks() -> tuple[int, bool, set[str], dict[str, Any]]:
        hooks = sum(len(module._forward_hooks) for module in model.modules())
        return hooks, model.is_gradient_checkpointing, set(vars(model)), model.config.to_dict()

    options = {"train_dataset": Rows(rows), "eval_dataset": None}
    trainer = quiet_trainer(tmp_path, model, trainer_kwargs=options, gradient_checkpointing=True)
    for is_enabled in (False, True):
        before = copy.deepcopy(get_hooks())
        assert before[:2] == (is_enabled, is_enabled)
        trainer.lr_find(num_training=2)
        trainer.scale_batch_size(max_val=4)
        assert get_hooks() == before
        trainer.train()


# ---- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "keywords", "message"),
    [
        ("lr_find", {"mode": "log"}, "mode='log'.: give 'exponential' or 'linear'"),
        ("lr_find", {"min_lr": 1.0, "max_lr": 0.1}, r"min_lr=1.0\): give a number above 0 and below max_lr=0.1"),
        ("lr_find", {"num_training": 0}, "number of learning rates to try"),
        ("lr_find", {"early_stop_threshold": 0.5}, "give None, or a number above 1"),
        ("scale_batch_size", {"mode": "double"}, "mode='double'.: give 'power' or 'binsearch'"),
        ("scale_batch_size", {"init_val": 0}, r"init_val=0\): give a whole number"),
        ("scale_batch_size", {"margin": 1}, "share to take off"),
    ],
)
def test_invalid_parameters_are_refused(tmp_path: Path, method: str, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(quiet_trainer(tmp_path), method)(**keywords)


def test_a_trainer_that_could_not_be_restored_is_refused(tmp_path: Path) -> None:
    class NestedFinder(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainer.lr_find()

    trainer = quiet_trainer(tmp_path, max_steps=1, trainer_kwargs={"callbacks": [NestedFinder()]})
    with pytest.raises(RuntimeError, match=r"lr_find\(\) was called while this Trainer trains"):
        trainer.train()
    sharded = quiet_trainer(tmp_path)
    sharded.is_fsdp_enabled = True
    with pytest.raises(NotImplementedError, match="fsdp splits it: call it in a run of one process, or with DDP"):
        sharded.scale_batch_size()
    with pytest.raises(NotImplementedError, match="steps of optim='galore_adamw_layerwise'"):
        quiet_trainer(tmp_path, optim="galore_adamw_layerwise", optim_target_modules=["inner"]).lr_find()
