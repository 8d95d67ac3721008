from __future__ import annotations

import math
from collections.abc import Iterator

from littrainer.report import history
from littrainer.report.history import EVALUATION, TRAINING, Point, read_history

from .folders import LOGGED


def test_metrics_are_told_apart_by_training_and_evaluation() -> None:
    history = read_history(LOGGED)
    assert history.curves["loss", TRAINING] == [Point(2, 1.5, 0.5), Point(4, 0.5, 1.0)]
    assert history.curves["loss", EVALUATION] == [Point(4, 0.625, 1.0)]
    assert history.curves["accuracy", EVALUATION] == [Point(4, 0.875, 1.0)]
    assert history.notes == []


def test_what_was_logged_about_the_whole_training_is_no_curve() -> None:
    history = read_history(LOGGED)
    assert history.summary == {
        "train_loss": 1.0,
        "train_runtime": 125.0,
        "train_samples_per_second": 64.0,
        "total_flos": 0.0,
    }
    assert ("train_loss", TRAINING) not in history.curves


def test_each_set_of_a_dict_of_evaluation_sets_is_a_source_of_its_own() -> None:
    history = read_history(
        [
            {"step": 1, "eval_hard_loss": 2.0, "eval_hard_runtime": 0.1},
            {"step": 1, "eval_hard_tail_loss": 3.0, "eval_hard_tail_runtime": 0.1},
            {"step": 1, "eval_loss": 1.0, "eval_runtime": 0.1},
        ]
    )
    values = {source: points[0].value for (metric, source), points in history.curves.items() if metric == "loss"}
    assert values == {"hard": 2.0, "hard_tail": 3.0, EVALUATION: 1.0}


def test_an_evaluation_under_a_prefix_of_its_own_is_a_source_too() -> None:
    history = read_history([{"step": 1, "test_loss": 2.0, "test_runtime": 0.1}])
    assert history.curves["loss", "test"] == [Point(1, 2.0, None)]


def test_an_evaluation_after_training_takes_the_place_of_the_one_at_the_same_step() -> None:
    history = read_history([{"step": 4, "eval_loss": 2.0}, {"step": 4, "eval_loss": 1.0}])
    assert [point.value for point in history.curves["loss", EVALUATION]] == [1.0]


def test_values_that_are_not_finite_are_kept_and_told_of() -> None:
    history = read_history([{"step": step, "loss": math.nan if step > 1 else 1.0} for step in range(1, 9)])
    assert history.notes == ["loss (training): 7 of 8 values are nan or infinite, at step 2, 3, 4, 5, 6 and 2 more."]


def test_an_integer_beyond_the_range_of_floats_is_infinite() -> None:
    assert read_history([{"step": 1, "loss": -(10**400)}]).curves["loss", TRAINING][0].value == -math.inf


def test_values_that_are_no_numbers_are_left_out_and_named() -> None:
    history = read_history(
        [{"step": 1, "loss": 1.0, "remark": "good", "eval_matrix": [[1]], "flag": True, "void": None}]
    )
    assert list(history.curves) == [("loss", TRAINING)]
    assert history.notes == ["Not drawn, since they hold no number: remark, eval_matrix, flag, void."]


def test_entries_without_a_step_are_left_out_and_counted() -> None:
    history = read_history([{"loss": 1.0}, "text", {"step": "3", "loss": 1.0}, {"step": 1, "loss": 1.0}])
    assert [point.step for point in history.curves["loss", TRAINING]] == [1]
    assert history.notes == ["3 of 4 entries of log_history are left out: they have no step."]


class NeverWalkedThrough(dict[str, str]):
    def __iter__(self) -> Iterator[str]:
        raise AssertionError("as many names as there are evaluation sets were looked at for one metric")


def test_a_metric_finds_its_evaluation_set_without_a_look_at_each_of_thousands() -> None:
    prefixes = NeverWalkedThrough({"eval": EVALUATION, "eval_a": "a", "eval_a_b": "a_b"})
    for name, key in (
        ("eval_a_b_loss", ("loss", "a_b")),
        ("eval_a_loss", ("loss", "a")),
        ("eval_c_loss", ("c_loss", EVALUATION)),
        ("eval_a_b", ("b", "a")),
        ("eval", ("eval", TRAINING)),
        ("evaluation_loss", ("evaluation_loss", TRAINING)),
        ("loss", ("loss", TRAINING)),
    ):
        assert history._key_of(name, prefixes) == key
