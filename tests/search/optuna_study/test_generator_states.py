"""Random generators of samplers, kept and put back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import optuna
import pytest

from littrainer.search.optuna_study.generator_states import generator_states, set_generator_states

SAMPLERS: dict[str, Any] = {
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=2),
    "genetic": lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=2),
}


def drawn(sampler: Any, study: Any, number: int) -> list[float]:
    study.sampler = sampler
    study.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=number)
    return [trial.params["x"] for trial in study.trials[-number:]]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_with_the_states_of_another_draws_what_that_one_would(name: str) -> None:
    one, other = (optuna.create_study() for _ in range(2))
    sampler = SAMPLERS[name](5)
    assert drawn(sampler, one, 4) == drawn(SAMPLERS[name](5), other, 4)
    states = json.loads(json.dumps(generator_states(sampler)))
    expected = drawn(sampler, one, 3)
    later = SAMPLERS[name](5)
    assert set_generator_states(later, states)
    assert drawn(later, other, 3) == expected


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_generators_of_all_kinds_are_put_back(kind: Any) -> None:
    class Holder:
        def __init__(self) -> None:
            self.generator = np.random.Generator(kind(3))

    one, other = Holder(), Holder()
    one.generator.random(7)
    assert set_generator_states(other, json.loads(json.dumps(generator_states(one))))
    assert other.generator.random() == one.generator.random()


def test_a_sampler_with_other_generators_is_left_as_it_is() -> None:
    states = generator_states(optuna.samplers.TPESampler(seed=1))
    random = optuna.samplers.RandomSampler(seed=2)
    before = generator_states(random)
    assert not set_generator_states(random, states)
    assert generator_states(random) == before


def test_an_object_that_holds_itself_is_looked_through_once() -> None:
    class Holder:
        def __init__(self) -> None:
            self.itself = self
            self.generator = np.random.RandomState(1)

    assert len(generator_states(Holder())) == 1
