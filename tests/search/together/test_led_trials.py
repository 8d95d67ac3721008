"""A trial in the process that draws, and the same one in another process; both are in this process here."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import torch.distributed as dist

from littrainer.search.failures import SearchMistake
from littrainer.search.together import led_trials
from littrainer.search.together.led_trials import FollowingTrial, LeadingTrial

Pair = tuple[LeadingTrial, FollowingTrial]


class EverySecond(optuna.pruners.BasePruner):
    """Prunes each second time that it is asked."""

    asked = 0

    def prune(self, study: Any, trial: Any) -> bool:
        self.asked += 1
        return self.asked % 2 == 0


@pytest.fixture(autouse=True)
def shared_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)


def pair_of(**keywords: Any) -> Pair:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), **keywords)
    study.enqueue_trial({}, user_attrs={"from": "the script"})
    leading = LeadingTrial(study.ask())
    return leading, FollowingTrial(leading.facts)


def ask(trial: Any, *names: str) -> dict[str, Any]:
    questions = {
        "rate": lambda: trial.suggest_float("rate", 1e-4, 1e-1, log=True),
        "layers": lambda: trial.suggest_int("layers", 2, 8, step=2),
        "kind": lambda: trial.suggest_categorical("kind", ["cosine", None, 3]),
    }
    return {name: questions[name]() for name in names}


def test_the_other_process_gets_what_was_drawn_in_whatever_order_it_asks() -> None:
    leading, following = pair_of()
    drawn = ask(leading, "rate", "layers", "kind")
    assert ask(following, "kind", "rate", "layers") == drawn
    assert following.params == leading.params == drawn
    assert following.distributions == leading.distributions
    assert (following.number, following.user_attrs) == (0, {"from": "the script"})


def test_the_leading_trial_is_the_one_of_the_study() -> None:
    leading, _ = pair_of()
    ask(leading, "rate")
    leading.set_user_attr("note", 1)
    stored = leading.study.trials[0]
    assert isinstance(leading, optuna.Trial)
    assert stored.params == leading.params and stored.user_attrs["note"] == 1


def test_what_is_known_may_be_asked_for_again_in_one_process_alone() -> None:
    leading, following = pair_of()
    drawn = ask(leading, "rate")
    assert ask(leading, "rate") == drawn
    assert ask(following, "rate") == ask(following, "rate") == drawn


def test_a_space_that_asks_for_something_else_in_another_process_is_named() -> None:
    leading, following = pair_of()
    ask(leading, "rate")
    leading.space_is_asked({})
    with pytest.raises(SearchMistake, match="asks for the hyperparameter 'layers' in process 1, and in process 0"):
        ask(following, "layers")


def told_by_rank(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the processes have told each other so far."""
    told: list[Any] = []

    def from_each(value: Any) -> list[Any]:
        told.append(value)
        return told

    monkeypatch.setattr(led_trials, "from_each", from_each)
    return told


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ({"epochs": 2, "layers": [4, 4]}, "returned 1 for 'epochs' in process 0, and 2 in process 1"),
        ({"epochs": 1, "layers": [4, 6]}, r"returned \[4, 4\] for 'layers' in process 0, and \[4, 6\] in process 1"),
        ({"epochs": 1}, r"returned \[4, 4\] for 'layers' in process 0, and no value in process 1"),
        ({"epochs": 1, "layers": [4, 4], "seed": 3}, "returned no value for 'seed' in process 0, and 3 in process 1"),
    ],
)
def test_a_space_that_returns_something_else_in_another_process_is_named(
    monkeypatch: pytest.MonkeyPatch, returned: dict[str, Any], told: str
) -> None:
    told_by_rank(monkeypatch)
    leading, following = pair_of()
    leading.space_is_asked({"epochs": 1, "layers": [4, 4]})
    with pytest.raises(SearchMistake, match=told):
        following.space_is_asked(returned)


def test_values_that_are_the_same_in_all_processes_may_be_objects_or_not_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spaces = told_by_rank(monkeypatch)
    for trial in pair_of():
        trial.space_is_asked({"threshold": float("nan"), "config": object(), "kinds": [object()]})
    assert len(spaces) == 2


def test_what_the_model_asks_for_later_is_waited_for() -> None:
    leading, following = pair_of()
    for trial in (leading, following):
        trial.space_is_asked({})
    drawn = ask(leading, "kind")
    assert ask(following, "kind") == drawn


def test_whether_to_prune_is_decided_once_for_each_step() -> None:
    leading, following = pair_of(pruner=EverySecond())
    answers = []
    for step in (1, 2, 3):
        for trial in (leading, following):
            trial.report(0.5, step)
            answers.append([trial.should_prune(), trial.should_prune()])
    assert answers == [[False] * 2, [False] * 2, [True] * 2, [True] * 2, [False] * 2, [False] * 2]
    assert leading.study.trials[0].intermediate_values == {1: 0.5, 2: 0.5, 3: 0.5}


def test_the_study_in_another_process_tells_its_name_and_directions() -> None:
    _, following = pair_of(study_name="rates", direction="maximize")
    assert (following.study.study_name, following.study.direction.name) == ("rates", "MAXIMIZE")
    assert not following.study._is_multi_objective()
    _, following = pair_of(directions=["minimize", "maximize"])
    assert following.study._is_multi_objective()
    with pytest.raises(RuntimeError, match="has directions"):
        _ = following.study.direction
