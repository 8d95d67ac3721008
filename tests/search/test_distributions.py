from __future__ import annotations

from typing import Any

import pytest

from littrainer.search.distributions import of_optuna, of_ray

optuna = pytest.importorskip("optuna")


def test_optunas_distributions_keep_their_ends_spread_and_step() -> None:
    study = optuna.create_study()
    trial = study.ask()
    trial.suggest_float("rate", 1e-5, 1e-1, log=True)
    trial.suggest_float("decay", 0.0, 0.5, step=0.1)
    trial.suggest_int("epochs", 1, 9, step=2)
    trial.suggest_categorical("optim", ["sgd", None, 3])
    found = {name: of_optuna(drawn) for name, drawn in trial.distributions.items()}
    assert found == {
        "rate": {"kind": "float", "low": 1e-5, "high": 1e-1, "log": True, "step": None},
        "decay": {"kind": "float", "low": 0.0, "high": 0.5, "log": False, "step": 0.1},
        "epochs": {"kind": "int", "low": 1, "high": 9, "log": False, "step": 2},
        "optim": {"kind": "categorical", "choices": ["sgd", None, 3]},
    }


def _number(kind: str, low: float, high: float, log: bool = False, step: float | None = None) -> dict[str, Any]:
    return {"kind": kind, "low": low, "high": high, "log": log, "step": step}


def test_rays_search_space_is_told_with_both_ends_included() -> None:
    # Without the rest of Ray Tune, whose import takes seconds.
    sample = pytest.importorskip("ray.tune.search.sample")
    assert of_ray(sample.uniform(0.0, 2.0)) == _number("float", 0.0, 2.0)
    assert of_ray(sample.loguniform(1e-5, 1e-2)) == _number("float", 1e-5, 1e-2, log=True)
    assert of_ray(sample.quniform(0.0, 1.0, 0.25)) == _number("float", 0.0, 1.0, step=0.25)
    assert of_ray(sample.qloguniform(1.0, 16.0, 1.0)) == _number("float", 1.0, 16.0, log=True, step=1.0)
    assert of_ray(sample.randint(1, 5)) == _number("int", 1, 4, step=1)
    assert of_ray(sample.lograndint(1, 50)) == _number("int", 1, 49, log=True, step=1)
    assert of_ray(sample.qrandint(2, 10, 2)) == _number("int", 2, 10, step=2)
    assert of_ray(sample.choice([4, 8])) == {"kind": "categorical", "choices": [4, 8]}
    assert of_ray({"grid_search": [1, 2]}) == {"kind": "categorical", "choices": [1, 2]}


def test_what_has_no_ends_is_left_untold() -> None:
    sample = pytest.importorskip("ray.tune.search.sample")
    assert of_ray(sample.randn()) is None
    assert of_ray(sample.sample_from(lambda spec: 1)) is None
    assert of_ray(0.5) is None
    assert of_ray("sgd") is None
