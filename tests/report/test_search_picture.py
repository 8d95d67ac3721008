from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from littrainer.report.picture import picture
from littrainer.report.reading import read_folders
from littrainer.report.search_picture import search_drawing
from littrainer.search.record import TrialRecord

from .folders import write_state
from .search_folders import some_trials, write_search
from .test_page import HOSTILE


def drawn(folder: Path) -> Any:
    (search,) = read_folders([str(folder)]).searches
    return search_drawing(search, "auto")


def titles_of(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_a_search_is_drawn_by_objective_importance_and_lines(tmp_path: Path) -> None:
    figure = drawn(write_search(tmp_path))
    assert titles_of(figure) == ["objective over trials", "Importance of parameters", ""]
    objective, importance, parallel = figure.axes
    assert [text.get_text() for text in objective.get_legend().get_texts()] == [
        *("best so far", "complete", "pruned", "without a value", "best"),
    ]
    assert len(importance.patches) == 3
    # One line for each complete trial, and one for each axis.
    assert len(parallel.lines) == 10 + 4


def test_two_objectives_have_a_chart_and_bars_each(tmp_path: Path) -> None:
    figure = drawn(write_search(tmp_path, some_trials(20, 2), ["maximize", "minimize"]))
    assert [title.replace("\n", " ") for title in titles_of(figure)] == [
        *("objective 1 over trials", "objective 2 over trials"),
        *("Importance of parameters for objective 1", "Importance of parameters for objective 2"),
        "",
    ]


def test_a_search_without_ended_trials_is_a_picture_that_says_so(tmp_path: Path) -> None:
    figure = drawn(write_search(tmp_path, [TrialRecord("0", "running")]))
    assert "no trial has ended" in [text.get_text() for text in figure.texts]


def test_a_search_and_a_training_stand_in_one_picture(tmp_path: Path) -> None:
    def pixels(folder: Path) -> tuple[int, int]:
        found = read_folders([str(folder)])
        png = picture(found.runs, "auto", "littrainer report", found.searches)
        assert b"littrainer report" in png[:4096]
        return size_of(png)

    search, training = pixels(write_search(tmp_path / "a")), pixels(write_state(tmp_path / "b"))
    both = pixels(write_state(write_search(tmp_path / "c")))
    assert both == (max(search[0], training[0]), search[1] + training[1])


def test_hostile_names_are_drawn_as_they_stand(tmp_path: Path) -> None:
    trials = [
        TrialRecord(
            str(number), "complete", float(number), {"$\\frac{1}$": number, "_\ud800" * 90: f"${HOSTILE}{number}$"}
        )
        for number in range(9)
    ]
    folder = write_search(tmp_path / "$x^", trials, objective_names=["$\\bad"])
    found = read_folders([str(folder)])
    assert size_of(picture(found.runs, "auto", "mark", found.searches))[0] > 500


def test_the_legend_of_a_chart_keeps_its_distance_from_the_heading_below(tmp_path: Path) -> None:
    figure = drawn(write_search(tmp_path))
    figure.draw_without_rendering()
    objective, _, parallel = figure.axes
    (heading,) = [text for text in parallel.texts if text.get_text().startswith("Complete trials")]
    room = objective.get_legend().get_window_extent().y0 - heading.get_window_extent().y1
    assert room > 0.15 * figure.dpi
