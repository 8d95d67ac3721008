"""The libraries that run a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from littrainer import BestRun
from littrainer.arguments.choices import HPSearchBackend
from littrainer.search.backends import (
    ALL_HYPERPARAMETER_SEARCH_BACKENDS,
    HyperParamSearchBackendBase,
    OptunaBackend,
    RayTuneBackend,
    WandbBackend,
    default_hp_search_backend,
    find_backend,
)
from tests.search.trainers import rate_space, searched_trainer


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the backends that count as installed, for tests to change."""
    names: set[str] = set()
    for backend in (OptunaBackend, RayTuneBackend, WandbBackend):
        monkeypatch.setattr(backend, "is_available", staticmethod(lambda name=backend.name: name in names))
    return names


def test_the_first_installed_backend_is_the_default_and_without_any_the_error_lists_commands(
    installed: set[str],
) -> None:
    message = r"none is installed: `pip install optuna` for optuna; `pip install 'ray\[tune\]'` for ray; .*wandb"
    with pytest.raises(RuntimeError, match=message):
        find_backend(None)
    with pytest.raises(RuntimeError, match=r"backend='ray' is not installed: run `pip install 'ray\[tune\]'`"):
        find_backend("ray")
    for name in ("wandb", "ray", "optuna"):
        installed.add(name)
        assert default_hp_search_backend() == name


def test_backends_have_a_name_and_a_member_and_an_unknown_name_suggests_the_nearest() -> None:
    assert [type(find_backend(name)[1]) for name in ("optuna", HPSearchBackend.OPTUNA)] == [OptunaBackend] * 2
    with pytest.raises(ValueError, match=r"backend='optune' is not known \(did you mean 'optuna'\?\)"):
        find_backend("optune")
    with pytest.raises(NotImplementedError, match="pass hp_space"):
        HyperParamSearchBackendBase().default_hp_space(None)


class Twice(HyperParamSearchBackendBase):
    """A backend that trains with two learning rates and returns the first."""

    name = "twice"

    @staticmethod
    def is_available() -> bool:
        return True

    def run(self, trainer: Any, n_trials: int, direction: Any, **kwargs: Any) -> BestRun:
        for rate in (0.01, 0.02):
            trainer.train(trial={"learning_rate": rate})
            self.rates.append((trainer.args.learning_rate, trainer.objective))
        return BestRun("first", self.rates[0][1], {"learning_rate": 0.01})

    rates: list[Any] = []  # noqa: RUF012


def test_a_script_may_register_a_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ALL_HYPERPARAMETER_SEARCH_BACKENDS, "twice", Twice)
    monkeypatch.setattr(Twice, "rates", [])
    trainer = searched_trainer(tmp_path, eval_strategy="steps", eval_steps=2)
    best = trainer.hyperparameter_search(rate_space, backend="twice", n_trials=2)
    assert [rate for rate, _ in Twice.rates] == [0.01, 0.02]
    assert best == ("first", Twice.rates[0][1], {"learning_rate": 0.01}, None)
    assert Twice.rates[0][1] != Twice.rates[1][1]
    assert trainer.args.learning_rate == pytest.approx(0.01)
