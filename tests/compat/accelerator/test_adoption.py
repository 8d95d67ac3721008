"""An Accelerator of accelerate's own in the place of the facade."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from littrainer import Trainer
from littrainer.compat.accelerator import AcceleratorFacade
from tests.scenarios.trainers import quiet_trainer


def test_its_settings_go_over_to_the_facade(tmp_path: Path) -> None:
    from accelerate import Accelerator

    trainer: Any = quiet_trainer(tmp_path)
    trainer.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    assert isinstance(trainer.accelerator, AcceleratorFacade)
    assert trainer.accelerator.gradient_accumulation_steps == 3
    assert trainer.args.accelerator_config.use_seedable_sampler is False


def test_a_facade_that_replaces_another_goes_on_with_what_fit_carries_out(tmp_path: Path) -> None:
    trainer: Any = quiet_trainer(tmp_path)
    trainer.accelerator.module = module = object()
    trainer.accelerator = AcceleratorFacade(trainer.args)
    assert trainer.accelerator.module is module


def test_another_precision_than_the_arguments_ask_for_is_refused_at_construction(tmp_path: Path) -> None:
    from accelerate import Accelerator

    class Own(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            self.accelerator = Accelerator(cpu=True)

    with pytest.raises(ValueError, match=r"create_accelerator_and_postprocess .* has mixed_precision='no'"):
        quiet_trainer(tmp_path, kind=Own, bf16=True)


def test_a_trained_trainer_can_be_copied(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.train()
    assert copy.deepcopy(trainer).state.global_step == 1
