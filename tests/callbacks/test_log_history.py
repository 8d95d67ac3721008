from __future__ import annotations

import math

from littrainer.callbacks.log_history import EVALUATION, TRAINING, Point, collect_logged_values, parse_log_history
from tests.commands.report_folders import LOGGED, SUMMARY


def test_metrics_are_grouped_by_training_and_evaluation_and_totals_are_no_curves() -> None:
    history = parse_log_history(LOGGED)
    assert history.curves["loss", TRAINING] == [Point(2, 1.5, 0.5), Point(4, 0.5, 1.0)]
    assert history.curves["loss", EVALUATION] == [Point(4, 0.625, 1.0)]
    assert history.curves["accuracy", EVALUATION] == [Point(4, 0.875, 1.0)]
    assert history.summary == SUMMARY and ("train_loss", TRAINING) not in history.curves
    assert history.notes == []


def test_each_evaluation_set_and_each_prefix_is_a_source() -> None:
    history = parse_log_history(
        [
            {"step": 1, "eval_hard_loss": 2.0, "eval_hard_runtime": 0.1},
            {"step": 1, "eval_hard_tail_loss": 3.0, "eval_hard_tail_runtime": 0.1},
            {"step": 1, "eval_loss": 1.5, "eval_runtime": 0.1, "eval_soft_loss": 5.0, "evaluation_loss": 6.0},
            {"step": 1, "test_loss": 4.0, "test_runtime": 0.1},
            {"step": 1, **SUMMARY},
            {"step": 1, "eval_loss": 1.0},
        ]
    )
    loss = history.curves["loss", EVALUATION]
    assert [(point.value, point.is_after_training) for point in loss] == [(1.5, False), (1.0, True)]
    values = {key: points[-1].value for key, points in history.curves.items() if "loss" in key[0]}
    assert values == {
        ("loss", "hard"): 2.0,
        ("loss", "hard_tail"): 3.0,
        ("loss", EVALUATION): 1.0,
        ("soft_loss", EVALUATION): 5.0,
        ("evaluation_loss", TRAINING): 6.0,
        ("loss", "test"): 4.0,
    }


def test_notes_name_values_that_are_not_finite() -> None:
    entries = [{"step": step, "loss": math.nan if step > 1 else 1.0} for step in range(1, 9)]
    assert parse_log_history(entries).notes == [
        "loss (training): 7 of 8 values are nan or infinite, at step 2, 3, 4, 5, 6 and 2 more."
    ]
    history = parse_log_history([{"step": 1, "loss": 1.0, "remark": "a", "flag": True}])
    assert list(history.curves) == [("loss", TRAINING)] and history.notes == []


def test_entries_without_a_step_are_skipped() -> None:
    entries = [{"my_score": 1.0}, "text", {"step": "3", "loss": 2.0}, {"step": 1, "loss": 1.0}]
    assert list(parse_log_history(entries).curves) == [("loss", TRAINING)]
    assert collect_logged_values(entries) == {(1, "loss"): 1.0}


def test_logs_with_input_tokens_do_not_end_the_training() -> None:
    counted = {"num_input_tokens_seen": 16, "train_runtime": 0.5, "train_tokens_per_second": 32.0}
    history = parse_log_history([{**counted, **entry} if "loss" in entry else entry for entry in LOGGED])
    assert history.curves["loss", TRAINING] == [Point(2, 1.5, 0.5), Point(4, 0.5, 1.0)]
    assert ("train_runtime", TRAINING) not in history.curves and history.summary == SUMMARY
