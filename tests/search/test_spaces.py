"""The default spaces are those of transformers."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from transformers import trainer_utils

from littrainer.search import spaces


def test_optunas_draws_from_the_same_distributions() -> None:
    drawn: list[Any] = []
    for space in (spaces.default_hp_space_optuna, trainer_utils.default_hp_space_optuna):
        trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1)).ask()
        drawn.append((space(trial), trial.distributions))
    assert drawn[0] == drawn[1]
    assert list(drawn[0][0]) == list(drawn[0][1])


def test_rays_has_the_same_domains() -> None:
    pytest.importorskip("ray")

    def facts_about(domain: Any) -> tuple[Any, ...]:
        names = ("categories", "lower", "upper")
        return type(domain), type(domain.get_sampler()), [getattr(domain, name, None) for name in names]

    ours, theirs = spaces.default_hp_space_ray(None), trainer_utils.default_hp_space_ray(None)
    assert list(ours) == list(theirs)
    assert [facts_about(ours[name]) for name in ours] == [facts_about(theirs[name]) for name in ours]


def test_the_sweep_of_weights_and_biases_is_the_same() -> None:
    pytest.importorskip("wandb")
    assert spaces.default_hp_space_wandb(None) == trainer_utils.default_hp_space_wandb(None)
