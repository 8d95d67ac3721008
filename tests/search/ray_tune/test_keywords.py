from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from littrainer.search.ray_tune.keywords import checked_keywords, pauses_trials, time_limits
from tests.search.trainers import searched_trainer

tune: Any = pytest.importorskip("ray.tune")


def asha(**changes: Any) -> Any:
    return tune.schedulers.ASHAScheduler(**changes)


def population() -> Any:
    return tune.schedulers.PopulationBasedTraining(hyperparam_mutations={"learning_rate": [1e-3]})


def evaluating_trainer(folder: Path) -> Any:
    return searched_trainer(folder, eval_strategy="steps", eval_steps=1)


def test_a_trial_gets_one_cpu_and_its_failure_does_not_end_the_search(tmp_path: Path) -> None:
    found = checked_keywords(searched_trainer(tmp_path), "min", {})
    assert found["resources_per_trial"] == {"cpu": 1}
    assert found["raise_on_failed_trial"] is False
    assert type(found["progress_reporter"]) is tune.CLIReporter


def test_what_the_script_gives_is_passed_on(tmp_path: Path) -> None:
    given = {"resources_per_trial": {"cpu": 2}, "raise_on_failed_trial": True, "progress_reporter": None, "verbose": 3}
    found = checked_keywords(searched_trainer(tmp_path), "min", given)
    assert {name: found[name] for name in given} == given


def test_an_unknown_keyword_suggests_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="resources_per_trial"):
        checked_keywords(searched_trainer(tmp_path), "min", {"resource_per_trial": {"cpu": 1}})


@pytest.mark.parametrize(
    ("name", "instead"), [("config", "hp_space"), ("num_samples", "n_trials"), ("run_or_experiment", "training")]
)
def test_what_the_search_decides_is_refused_with_where_to_give_it(tmp_path: Path, name: str, instead: str) -> None:
    with pytest.raises(TypeError, match=instead):
        checked_keywords(searched_trainer(tmp_path), "min", {name: 1})


@pytest.mark.parametrize("make", [asha, population, lambda: "median_stopping_rule"])
def test_a_scheduler_is_refused_where_nothing_is_evaluated_while_training(tmp_path: Path, make: Any) -> None:
    with pytest.raises(RuntimeError, match="eval_strategy"):
        checked_keywords(searched_trainer(tmp_path), "min", {"scheduler": make()})


def test_first_come_first_served_needs_no_evaluation(tmp_path: Path) -> None:
    found = checked_keywords(searched_trainer(tmp_path), "min", {"scheduler": "fifo"})
    assert type(found["scheduler"]) is tune.schedulers.FIFOScheduler


def test_a_scheduler_for_the_other_direction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="would keep the worst"):
        checked_keywords(evaluating_trainer(tmp_path), "min", {"scheduler": asha(metric="objective", mode="max")})


def test_a_scheduler_without_a_metric_goes_by_the_objective(tmp_path: Path) -> None:
    found = checked_keywords(evaluating_trainer(tmp_path), "max", {"scheduler": asha()})
    assert (found["metric"], found["mode"]) == ("objective", "max")


def test_a_scheduler_with_a_metric_of_its_own_keeps_it(tmp_path: Path) -> None:
    found = checked_keywords(evaluating_trainer(tmp_path), "max", {"scheduler": asha(metric="eval_loss", mode="min")})
    assert "metric" not in found and "mode" not in found


def test_more_than_one_gpu_for_a_trial_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 GPUs"):
        checked_keywords(searched_trainer(tmp_path), "min", {"resources_per_trial": {"cpu": 1, "gpu": 2}})


def test_only_schedulers_that_never_pause_do_without_a_checkpoint_of_each_report() -> None:
    schedulers = tune.schedulers
    assert not pauses_trials(None) and not pauses_trials(schedulers.FIFOScheduler()) and not pauses_trials(asha())
    assert pauses_trials(population())
    assert pauses_trials(schedulers.HyperBandScheduler())
    # It lets other trials go first until it can compare.
    assert pauses_trials(schedulers.MedianStoppingRule())


def test_the_limit_of_a_scheduler_is_no_pruning() -> None:
    assert time_limits(asha(max_t=7)) == {"training_iteration": 7}
    assert time_limits(tune.schedulers.HyperBandScheduler(max_t=9)) == {"training_iteration": 9}
    assert time_limits(None) == time_limits(population()) == {}
