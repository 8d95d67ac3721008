"""No method that transformers' Trainer calls on itself is missing from our tables of them."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import torch

from littrainer import Trainer
from littrainer.training.overrides import NEVER_CALLED
from tests.scenarios.overrides import OTHER_CALLS, OVERRIDE_POINTS
from tests.scenarios.releases import earlier_release
from tests.scenarios.trainers import quiet_trainer


def methods_called_in(package: Path) -> set[str]:
    """The methods of the Trainer of a release of transformers that it calls on itself or hands on, from its source."""
    tree = ast.parse((package / "trainer.py").read_text())
    trainer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
    methods = {node.name for node in trainer.body if isinstance(node, ast.FunctionDef)}
    return methods & {
        node.attr for node in ast.walk(trainer) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }


def test_each_method_that_the_trainer_of_transformers_calls_is_in_a_table() -> None:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    earlier = earlier_release()
    for package in (Path(spec.origin).parent, *([] if earlier is None else [earlier / "transformers"])):
        assert methods_called_in(package) <= {*OVERRIDE_POINTS, *OTHER_CALLS, *NEVER_CALLED}


def test_each_that_is_called_is_there_and_none_is_in_two_tables() -> None:
    assert [name for name in {*OVERRIDE_POINTS, *OTHER_CALLS} if not hasattr(Trainer, name)] == []
    assert len({*OVERRIDE_POINTS, *OTHER_CALLS, *NEVER_CALLED}) == sum(
        map(len, (OVERRIDE_POINTS, OTHER_CALLS, NEVER_CALLED))
    )


def test_an_own_create_optimizer_and_scheduler_takes_the_place_of_both(tmp_path: Path) -> None:
    called: list[Any] = []

    class Adding(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            super().create_optimizer_and_scheduler(num_training_steps=num_training_steps)
            called.append(self.lr_scheduler is not None)

    quiet_trainer(tmp_path, kind=Adding, max_steps=2).train()
    assert called == [True]
    called.clear()

    class MakesBoth(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            called.append(num_training_steps)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=0.5)

        def create_optimizer(self, model: Any = None) -> Any:
            called.append("create_optimizer")
            return super().create_optimizer()

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            called.append("create_scheduler")
            return super().create_scheduler(num_training_steps, optimizer)

    trainer: Any = quiet_trainer(tmp_path, kind=MakesBoth, max_steps=2, logging_strategy="steps", logging_steps=1)
    trainer.train()
    assert called == [2]
    assert isinstance(getattr(trainer.optimizer, "optimizer", trainer.optimizer), torch.optim.SGD)
    assert trainer.state.log_history[0]["learning_rate"] == 0.25
