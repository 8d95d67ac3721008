"""Optimizers, schedules and loaders that a script replaces during a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.fidelity.record import Record
from tests.fidelity.registry import Script, add_scripts, scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier


def make_script(changes: dict[str, Any], **events: Any) -> Script:
    """Return a script that trains with a callback whose events are functions that take the Trainer.

    Parameters:
        events: name of an event -> (optimizer step at which it acts, what it does).
    """

    def script(side: Side) -> Record:
        def event(step: int, act: Any) -> Any:
            def method(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == step:
                    act(trainer)

            return method

        methods = {name: event(*trainer_kwargs) for name, trainer_kwargs in events.items()}
        callback = type("Replacing", (side.TrainerCallback,), methods)()
        trainer = side.vector_trainer(callbacks=[callback], **changes)
        return side.train(trainer)

    return script


def another_optimizer(trainer: Any) -> None:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)


def prepared_optimizer(trainer: Any) -> None:
    trainer.optimizer = trainer.accelerator.prepare(torch.optim.SGD(trainer.model.parameters(), lr=0.5))


def a_tenth(trainer: Any) -> None:
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, factor=0.1, total_iters=100)


class Halving:
    """A schedule that is none of torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


def halving(trainer: Any) -> None:
    trainer.lr_scheduler = Halving(trainer.optimizer)


def replace_both(trainer: Any) -> None:
    another_optimizer(trainer)
    a_tenth(trainer)


def replace_by_plateau(trainer: Any) -> None:
    trainer.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer)


def set_accumulation(steps: int) -> Callable[[Any], None]:
    def accumulate(trainer: Any) -> None:
        trainer.args.gradient_accumulation_steps = steps

    return accumulate


def set_step(trainer: Any) -> None:
    parents = trainer.training_step
    trainer.training_step = lambda *args, **kwargs: parents(*args, **kwargs) * 2


TWO: dict[str, Any] = {"gradient_accumulation_steps": 2}
add_scripts(
    {
        "optimizer_replaced_at_a_steps_end": make_script({}, on_step_end=(4, another_optimizer)),
        "optimizer_replaced_right_before_it_steps": make_script(TWO, on_pre_optimizer_step=(2, prepared_optimizer)),
        "optimizer_and_schedule_replaced_when_training_begins": make_script({}, on_train_begin=(0, replace_both)),
        "schedule_replaced_twice": make_script({}, on_step_end=(3, a_tenth), on_optimizer_step=(6, halving)),
        "schedule_replaced_for_one_that_waits_for_a_metric": make_script(
            {"lr_scheduler_type": "constant"}, on_step_end=(3, replace_by_plateau)
        ),
        "accumulation_lowered_at_an_epochs_end": make_script(
            {**TWO, "max_steps": 8}, on_epoch_end=(3, set_accumulation(1))
        ),
        "accumulation_raised_when_an_epoch_begins": make_script(TWO, on_epoch_begin=(3, set_accumulation(4))),
        "training_step_set_while_training": make_script({}, on_train_begin=(0, set_step), on_epoch_begin=(5, set_step)),
    }
)


@scenario()
def optimizer_replaced_by_an_overridden_loss(side: Side) -> Record:
    class Replacing(side.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 3:
                another_optimizer(self)
            return super().compute_loss(*args, **kwargs)

    return side.train(Replacing(model=VectorClassifier(), args=side.arguments(), train_dataset=Rows(vector_rows(18))))


@scenario(predicts=True)
def a_replacement_accelerator_from_accelerate(side: Side) -> Record:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    class WithoutTheParent(side.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
            self.accelerator = Accelerator(gradient_accumulation_plugin=plugin)
            self.gather_function = self.accelerator.gather_for_metrics
            self.is_deepspeed_enabled = getattr(self.accelerator.state, "deepspeed_plugin", None) is not None
            self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    trainer = side.vector_trainer(kind=WithoutTheParent, gradient_accumulation_steps=2, eval_strategy="epoch")
    output = trainer.train()
    return side.record(trainer, output, predictions=trainer.predict(Rows(vector_rows(5, seed=2))))
