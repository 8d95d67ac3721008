"""`trainer.lr_find()`: what it finds, and that nothing is left of it."""

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

FALLING = [math.exp(-((max(place - 20, 0) / 10) ** 2)) for place in range(40)]


# ---- What it finds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exponential", "linear"])
def test_each_step_has_a_rate_of_its_own_from_the_lowest_to_the_highest(tmp_path: Path, mode: str) -> None:
    used: list[float] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            used.append(self.param_groups[0]["lr"])
            assert {group["lr"] for group in self.param_groups} == {used[-1]}
            return found

    given = {"optimizer_cls_and_kwargs": (Noting, {"lr": 1.0})}
    trainer = quiet_trainer(tmp_path, given=given, gradient_accumulation_steps=2, rows=20)
    found = trainer.lr_find(min_lr=1e-4, max_lr=1e-2, num_training=5, mode=mode)
    expected = [1e-4 * 10 ** (place / 2) for place in range(5)] if mode == "exponential" else np.linspace(1e-4, 1e-2, 5)
    assert used == found.results["lr"] == pytest.approx(list(expected)) and len(found.results["loss"]) == 5


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
def test_losses_are_the_running_mean_of_those_that_a_training_logs(tmp_path: Path, kind: type[Trainer]) -> None:
    changes: dict[str, Any] = {
        "optim": "sgd",
        "gradient_accumulation_steps": 3,
        "kind": kind,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "learning_rate": 1e-12,
        "num_train_epochs": 2,
    }
    found = quiet_trainer(tmp_path, rows=20, **changes).lr_find(1e-12, 1.1e-12, num_training=4).results["loss"]
    trainer = quiet_trainer(tmp_path, rows=20, **changes)
    trainer.train()
    mean, weights, expected = 0.0, 0.0, []
    for loss in [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]:
        mean, weights = 0.98 * mean + 0.02 * loss, 0.98 * weights + 0.02
        expected.append(mean / weights)
    assert found == pytest.approx(expected, rel=1e-5) and len(set(found)) == 4


def test_the_suggestion_is_where_the_curve_is_steepest_and_passes_over_noise_and_ends() -> None:
    rates = [1e-6 * 1.5**place for place in range(40)]
    steepest = min(range(1, 39), key=lambda place: FALLING[place + 1] - FALLING[place - 1])
    found = RangeTest("exponential", rates, FALLING).suggestion()
    assert found == rates[steepest]
    # A cliff at the first step, one at the last, and a loss that is no number.
    disturbed = [9.0, *FALLING[1:-1], -9.0]
    disturbed[12] = math.nan
    assert RangeTest("exponential", rates, disturbed).suggestion() == rates[steepest]


def test_too_few_steps_suggest_nothing_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    assert RangeTest("linear", [0.1] * 12, [1.0] * 12).suggestion() is None
    assert "12 steps that were tried 1 are left to compare" in caplog.text and "num_training" in caplog.text
    assert RangeTest("linear", [0.1, 0.2, 0.3], [1.0, 0.5, 0.4]).suggestion(skip_begin=0, skip_end=0) == 0.1


def test_it_ends_at_a_loss_that_is_no_number(tmp_path: Path) -> None:
    class Broken(VectorClassifier):
        steps = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            self.steps += self.training
            outputs = super().forward(x, labels)
            return {**outputs, "loss": outputs["loss"] * math.nan} if self.steps == 15 else outputs

    found = quiet_trainer(tmp_path, Broken()).lr_find(num_training=30)
    assert [math.isnan(loss) for loss in found.results["loss"]] == [False] * 14 + [True]
    assert found.suggestion() is not None


def test_a_trial_of_the_script_tries_one_rate(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, lightning={"fast_dev_run": True})
    found = trainer.lr_find()
    assert found.results["lr"] == [1e-8] and found.suggestion() is None


# ---- The plot --------------------------------------------------------------------------------------------------------


def test_the_plot_draws_the_curve_and_marks_the_suggestion() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    rates = [1e-6 * 1.5**place for place in range(40)]
    found = RangeTest("exponential", rates, FALLING)
    figure = found.plot(suggest=True)
    (axes,) = figure.axes
    curve, mark = axes.lines
    assert list(curve.get_xdata()) == rates and list(curve.get_ydata()) == FALLING
    assert list(mark.get_xdata()) == [found.suggestion()]
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "learning rate", "loss")
    pyplot.close("all")


# ---- What is left of it ----------------------------------------------------------------------------------------------


class Noting(TrainerCallback):
    def __init__(self) -> None:
        self.events = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.events += 1


class LightningNoting(pl.Callback):
    batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


def prepared(folder: Path, warm: bool) -> Trainer:
    torch.manual_seed(3)
    model = NoisyClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    flat = [LambdaLR(optimizer, lambda step: 1 / (step + 1)) for _ in range(2)]
    given: dict[str, Any] = {
        "optimizers": (optimizer, SequentialLR(optimizer, flat, [3])),
        "callbacks": [Noting(), LightningNoting()],
    }
    trainer = quiet_trainer(folder, model, given=given, rows=20, max_steps=4, logging_strategy="steps", logging_steps=1)
    if warm:
        trainer.train()
    return trainer


def picture(trainer: Trainer, folder: Path) -> dict[str, Any]:
    model: Any = trainer.model
    schedule: Any = trainer.lr_scheduler
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [None if one.grad is None else one.grad.clone() for one in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "optimizer": copy.deepcopy(trainer.optimizer.state_dict()),
        "schedule": copy.deepcopy({**vars(schedule), "optimizer": None, "_schedulers": None}),
        "schedules inside": [copy.deepcopy(one.state_dict()) for one in schedule._schedulers],
        "arguments": copy.copy(vars(trainer.args)),
        "state": copy.deepcopy(vars(trainer.state)),
        "control": copy.copy(vars(trainer.control)),
        "callbacks": [list(trainer.callback_handler.callbacks), list(trainer.lightning_callbacks)],
        "heard": [trainer.callback_handler.callbacks[1].events, trainer.lightning_callbacks[0].batches],
        "files": sorted(folder.rglob("*")),
        "attributes": {name: id(value) for name, value in vars(trainer).items()},
    }


@pytest.mark.parametrize("warm", [False, True])
def test_it_leaves_everything_as_it_was(tmp_path: Path, warm: bool) -> None:
    trainer = prepared(tmp_path, warm)
    trainer.model.eval()
    trainer.model.head.weight.grad = torch.ones_like(trainer.model.head.weight)
    random.seed(5)
    np.random.seed(6)
    before, generators = picture(trainer, tmp_path), get_rng_states(gpu=False)
    trainer.lr_find(num_training=12)
    trainer.scale_batch_size(steps_per_trial=1)
    assert first_difference(get_rng_states(gpu=False), generators) is None
    after = picture(trainer, tmp_path)
    for name, value in before.items():
        if name in ("weights", "gradients", "optimizer"):
            torch.testing.assert_close(after[name], value, rtol=0, atol=0)
        else:
            assert after[name] == value, name
    histories = []
    for one in (trainer, prepared(tmp_path / "another", warm)):
        one.model.train()
        set_seed(1)
        one.train()
        histories.append([(entry["loss"], entry["grad_norm"]) for entry in one.state.log_history if "loss" in entry])
    assert histories[0] == histories[1] and len(histories[0]) == 4


def test_an_error_in_it_leaves_everything_as_it_was_too(tmp_path: Path) -> None:
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


def test_what_recomputing_changes_in_a_model_of_transformers_is_put_back(tmp_path: Path) -> None:
    model = tiny_llama()
    rows = [{"input_ids": [7, 8, 9], "labels": [7, 8, 9]}] * 8

    def found() -> tuple[int, bool, set[str], dict[str, Any]]:
        hooks = sum(len(module._forward_hooks) for module in model.modules())
        return hooks, model.is_gradient_checkpointing, set(vars(model)), model.config.to_dict()

    given = {"train_dataset": Rows(rows), "eval_dataset": None}
    trainer = quiet_trainer(tmp_path, model, given=given, gradient_checkpointing=True)
    for recomputes in (False, True):
        before = copy.deepcopy(found())
        assert before[:2] == (recomputes, recomputes)
        trainer.lr_find(num_training=2)
        trainer.scale_batch_size(max_val=4)
        assert found() == before
        trainer.train()


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"mode": "log"}, "mode='log'.: give 'exponential' or 'linear'"),
        ({"min_lr": 1.0, "max_lr": 0.1}, r"min_lr=1.0\): give a number above 0 and below max_lr=0.1"),
        ({"num_training": 0}, "number of learning rates to try"),
        ({"early_stop_threshold": 0.5}, "give None, or a number above 1"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(tmp_path: Path, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quiet_trainer(tmp_path).lr_find(**keywords)


def test_it_is_refused_where_the_trainer_could_not_be_left_as_it_was(tmp_path: Path) -> None:
    class Asking(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainer.lr_find()

    trainer = quiet_trainer(tmp_path, max_steps=1, given={"callbacks": [Asking()]})
    with pytest.raises(RuntimeError, match=r"lr_find\(\) was called while this Trainer trains"):
        trainer.train()
    sharded = quiet_trainer(tmp_path)
    sharded.is_fsdp_enabled = True
    with pytest.raises(NotImplementedError, match="fsdp splits it: call it in a run of one process, or with DDP"):
        sharded.scale_batch_size()
    with pytest.raises(NotImplementedError, match="steps of optim='galore_adamw_layerwise'"):
        quiet_trainer(tmp_path, optim="galore_adamw_layerwise", optim_target_modules=["inner"]).lr_find()
