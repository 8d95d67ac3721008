"""Overrides that nothing would call are refused, or told of, by name."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from littrainer import Trainer
from littrainer.compat.members import CALLED_IN_TRANSFORMERS_4, NEVER_CALLED
from tests.scenarios.trainers import quiet_trainer


def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """An override that does nothing."""


def test_overrides_that_are_never_called_are_one_error_at_construction_that_names_them_all(tmp_path: Path) -> None:
    subclass = type("Mine", (Trainer,), dict.fromkeys(("_run_epoch", "_prepare_for_training"), nothing))
    with pytest.raises(NotImplementedError, match="Mine overrides what littrainer never calls") as caught:
        quiet_trainer(tmp_path, kind=subclass)
    for name in ("_run_epoch", "_prepare_for_training"):
        assert f"{name} ({NEVER_CALLED[name]})" in str(caught.value)


def test_a_mixin_beside_the_trainer_counts_too(tmp_path: Path) -> None:
    mixin = type("Mixin", (), {"_build_accelerator_args": nothing})
    with pytest.raises(NotImplementedError, match="_build_accelerator_args"):
        quiet_trainer(tmp_path, kind=type("Mixed", (mixin, Trainer), {}))


def test_one_that_is_set_on_the_class_of_all_trainers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_run_epoch", nothing, raising=False)
    with pytest.raises(NotImplementedError, match="_run_epoch"):
        quiet_trainer(tmp_path)


def test_one_that_is_set_on_a_trainer_is_refused_when_it_trains(tmp_path: Path) -> None:
    trainer: Any = quiet_trainer(tmp_path)
    trainer._run_epoch = types.MethodType(nothing, trainer)
    with pytest.raises(NotImplementedError, match="_run_epoch"):
        trainer.train()


def test_no_method_that_is_refused_is_there_to_be_called() -> None:
    assert [name for name in NEVER_CALLED if hasattr(Trainer, name)] == []


@pytest.mark.parametrize("name", sorted(CALLED_IN_TRANSFORMERS_4))
def test_an_override_that_only_transformers_4_calls_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    quiet_trainer(tmp_path, kind=type("ForBoth", (Trainer,), {name: nothing}))
    assert f"ForBoth overrides methods that only transformers 4 calls: {name}" in caplog.text


def test_a_trainer_without_such_methods_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quiet_trainer(tmp_path, kind=type("Plain", (Trainer,), {"compute_loss": Trainer.compute_loss}))
    assert caplog.text == ""
