from __future__ import annotations

import math
from pathlib import Path

import pytest

from littrainer.report.importance import Importance
from littrainer.report.search_panels import (
    ABSENT_SHARE,
    GRADES,
    MOST_AXES,
    MOST_LINES,
    MOST_POINTS,
    foremost_parameters,
    numbers_of,
    objective_panels,
    parallel_panel,
    trade_off,
)
from littrainer.report.searches import parameters_of
from littrainer.search.record import TrialRecord

from .search_folders import some_trials, write_search
from .test_searches import search_of


def test_trials_are_numbered_by_their_ids_where_these_are_numbers(tmp_path: Path) -> None:
    def numbers(*ids: str) -> list[int]:
        return numbers_of(search_of(write_search(tmp_path, [TrialRecord(each, "complete", 1.0) for each in ids])))

    assert numbers("0", "2", "5") == [0, 2, 5]
    assert numbers("a1", "b2") == [1, 2]
    assert numbers("1", "1") == [1, 2]
    assert numbers("9" * 30, "\N{ARABIC-INDIC DIGIT ONE}") == [1, 2]


def test_the_best_so_far_changes_where_a_complete_trial_is_better_than_all_before(tmp_path: Path) -> None:
    values = [3.0, 4.0, 2.0, 2.5, 1.0]
    trials = [TrialRecord(str(number), "complete", value) for number, value in enumerate(values)]
    trials.insert(2, TrialRecord("7", "pruned", intermediate=[(5, 0.5)]))
    (panel,) = objective_panels(search_of(write_search(tmp_path, trials, ["minimize"])), "auto")
    assert panel.best == [(0, 3.0), (2, 2.0), (4, 1.0)]
    assert not panel.maximized and panel.stars == {5}
    (panel,) = objective_panels(search_of(write_search(tmp_path, trials, ["maximize"])), "auto")
    assert panel.best == [(0, 3.0), (1, 4.0)] and panel.maximized


def test_a_pruned_trial_stands_at_its_last_value_and_a_failed_one_has_none(tmp_path: Path) -> None:
    trials = some_trials()
    trials[0].objective = math.inf
    (panel,) = objective_panels(search_of(write_search(tmp_path, trials)), "auto")
    spots = {spot.x: spot for spot in panel.spots}
    assert spots[10].value == trials[10].intermediate[-1][1]
    assert spots[11].value is None and spots[11].state == "failed"
    assert spots[0].value is None and spots[0].state == "complete"


def test_a_running_trial_is_in_no_chart(tmp_path: Path) -> None:
    assert objective_panels(search_of(write_search(tmp_path, [TrialRecord("0", "running")])), "auto") == []
    search = search_of(write_search(tmp_path, [*some_trials(3), TrialRecord("3", "running")]))
    assert len(objective_panels(search, "auto")[0].spots) == 3


def test_of_very_many_trials_the_best_ones_stay(tmp_path: Path) -> None:
    trials = [TrialRecord(str(number), "complete", float(number == 3333), {"a": number}) for number in range(10_000)]
    search = search_of(write_search(tmp_path, trials))
    (panel,) = objective_panels(search, "auto")
    assert len(panel.spots) <= MOST_POINTS + 2
    assert 3333 in {spot.trial for spot in panel.spots}
    parallel = parallel_panel(search, parameters_of(search), parameters_of(search))
    assert parallel is not None and len(parallel.threads) <= MOST_LINES
    assert parallel.threads[-1].trial == 3333 and parallel.threads[-1].best
    assert parallel.left_out == (0, 10_000 - len(parallel.threads))


def test_lines_run_from_the_worst_to_the_best_in_five_grades(tmp_path: Path) -> None:
    search = search_of(write_search(tmp_path))
    parameters = parameters_of(search)
    panel = parallel_panel(search, parameters, parameters)
    assert panel is not None
    assert panel.names == ["learning_rate", "per_device_train_batch_size", "num_train_epochs", "objective"]
    grades = [thread.grade for thread in panel.threads]
    assert grades == sorted(grades) and set(grades) == set(range(GRADES))
    # The best stands at the top of the objective's axis, the worst at its foot.
    assert panel.threads[-1].shares[-1] == 1.0 and panel.threads[0].shares[-1] == 0.0
    assert [thread.best for thread in panel.threads].count(True) == 1


def test_a_parameter_that_a_trial_has_not_is_below_its_axis(tmp_path: Path) -> None:
    trials = some_trials(6)
    del trials[2].parameters["num_train_epochs"]
    search = search_of(write_search(tmp_path, trials))
    panel = parallel_panel(search, parameters_of(search), parameters_of(search))
    assert panel is not None and panel.incomplete == [False, False, True, False]
    (thread,) = [thread for thread in panel.threads if thread.trial == 2]
    assert thread.shares[2] == ABSENT_SHARE


def test_one_complete_trial_gives_no_lines(tmp_path: Path) -> None:
    search = search_of(write_search(tmp_path, [TrialRecord("0", "complete", 1.0, {"a": 1})]))
    assert parallel_panel(search, parameters_of(search), parameters_of(search)) is None


def test_the_most_important_parameters_come_first_and_no_more_than_fit(tmp_path: Path) -> None:
    names = [f"p{number}" for number in range(30)]
    trials = [TrialRecord(str(row), "complete", float(row), dict.fromkeys(names, row)) for row in range(5)]
    parameters = parameters_of(search_of(write_search(tmp_path, trials)))
    shown = foremost_parameters(parameters, Importance({"p20": 0.9, "p3": 0.1}, ""))
    assert [each.name for each in shown] == ["p20", "p3", "p0", "p1", "p2", "p4", "p5", "p6", "p7", "p8"]
    assert len(shown) == MOST_AXES


@pytest.mark.parametrize("objectives", [1, 2])
def test_two_objectives_are_set_against_each_other(tmp_path: Path, objectives: int) -> None:
    directions = ["maximize", "minimize"][:objectives]
    search = search_of(write_search(tmp_path, some_trials(6, objectives), directions))
    expected = [(number, *trial.objectives()) for number, trial in enumerate(search.trials)] if objectives == 2 else []
    assert trade_off(search) == expected
    assert [panel.best for panel in objective_panels(search, "auto")][1:] == [[]] * (objectives - 1)
