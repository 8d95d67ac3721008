from __future__ import annotations

from pathlib import Path

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.compat.accelerator.settings import Settings
from tests.scenarios.trainers import quiet_arguments


def test_even_batches_begins_as_in_the_arguments_and_is_written_without_changing_them(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, accelerator_config={"even_batches": False})
    settings = Settings(args)
    assert settings.even_batches is False
    settings.even_batches = True
    assert settings.even_batches is settings.dataloader_config.even_batches is True
    assert args.accelerator_config == AcceleratorConfig(even_batches=False)
    assert Settings(args).even_batches is False


def test_other_settings_of_loaders_are_those_of_the_arguments_when_they_are_written(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path)
    Settings(args).dataloader_config.dispatch_batches = False
    assert args.accelerator_config == AcceleratorConfig(dispatch_batches=False)
