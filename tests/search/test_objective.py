"""What a search goes by: the default objective, and what is refused as one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from littrainer.search.failures import ObjectiveIsNan, SearchMistake
from littrainer.search.objective import checked_objective, default_compute_objective, refuse_nan
from tests.search.trainers import rate_space, searched_trainer

SPEED = {"eval_runtime": 3.0, "eval_samples_per_second": 5.0, "eval_steps_per_second": 7.0, "epoch": 2.0}


def test_without_metrics_the_objective_is_the_evaluation_loss() -> None:
    assert default_compute_objective({"eval_loss": 0.25, **SPEED}) == 0.25


def test_with_metrics_it_is_their_sum_without_the_loss() -> None:
    metrics = {"eval_loss": 0.25, "eval_accuracy": 0.5, "eval_f1": 0.75, **SPEED}
    assert default_compute_objective(metrics) == 1.25
    assert metrics["eval_loss"] == 0.25


def test_losses_of_several_datasets_are_added() -> None:
    assert default_compute_objective({"eval_a_loss": 1.0, "eval_a_runtime": 9.0, "eval_b_loss": 2.0}) == 3.0


def test_it_is_what_transformers_computes() -> None:
    from transformers.trainer_utils import default_compute_objective as of_transformers

    for metrics in ({"eval_loss": 0.1, **SPEED}, {"eval_loss": 0.1, "eval_a": 0.1, "eval_b": 0.2, "eval_c": 0.3}):
        assert default_compute_objective(metrics) == of_transformers(metrics)


@pytest.mark.parametrize(
    "entry",
    ["num_input_tokens_seen", "eval_mem_cpu_alloc_delta", "eval_mem_gpu_peaked_delta", "eval_model_preparation_time"],
)
def test_what_says_nothing_about_quality_is_no_metric_which_is_told_of_once(
    entry: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert default_compute_objective({"eval_loss": 0.25, entry: 1e9}) == 0.25
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        f"The default objective leaves {entry} out"
    ]


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), torch.tensor(2.0)])
def test_numbers_of_any_library_become_pythons_own(value: Any) -> None:
    found = checked_objective(value, ["minimize"])
    assert found == 2.0
    assert type(found) is float


@pytest.mark.parametrize("value", [[1, 2.5], (1, 2.5), np.array([1, 2.5]), torch.tensor([1, 2.5])])
def test_several_objectives_are_a_list(value: Any) -> None:
    assert checked_objective(value, ["minimize", "maximize"]) == [1.0, 2.5]


def test_a_list_of_one_is_the_objective_of_one_direction() -> None:
    assert checked_objective([2], ["minimize"]) == 2.0


@pytest.mark.parametrize("value", [None, "0.5", {"eval_loss": 0.5}, [0.5, "0.5"]])
def test_what_is_no_number_is_refused_with_its_type(value: Any) -> None:
    with pytest.raises(SearchMistake, match=r"compute_objective returned .* \((a|an) \w+\)"):
        checked_objective(value, ["minimize", "minimize"] if isinstance(value, list) else ["minimize"])


@pytest.mark.parametrize(("value", "directions"), [([1, 2], ["minimize"]), (1.0, ["minimize", "maximize"])])
def test_another_number_of_objectives_than_directions_is_refused(value: Any, directions: list[str]) -> None:
    with pytest.raises(SearchMistake, match=f"direction names {len(directions)}"):
        checked_objective(value, directions)


def test_only_the_last_objective_may_not_be_nan() -> None:
    assert math.isnan(checked_objective(float("nan"), ["minimize"]))  # type: ignore[arg-type]
    with pytest.raises(ObjectiveIsNan, match=r"the objective is nan$"):
        refuse_nan(float("nan"))
    with pytest.raises(ObjectiveIsNan, match=r"\[1.0, nan\]"):
        refuse_nan([1.0, float("nan")])
    refuse_nan([1.0, float("inf")])


def test_an_objective_of_the_wrong_kind_ends_the_search_at_its_first_trial(tmp_path: Any) -> None:
    trainer = searched_trainer(tmp_path)
    seen: list[Any] = []

    def objective(metrics: dict[str, float]) -> Any:
        seen.append(metrics)
        return [metrics["eval_loss"], 1.0]

    with pytest.raises(SearchMistake, match="returned 2 numbers"):
        trainer.hyperparameter_search(rate_space, objective, n_trials=3, backend="optuna")
    assert len(seen) == 1
