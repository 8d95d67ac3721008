from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from littrainer.report.labels import LONGEST_LABEL
from littrainer.report.panels import MOST_FOREMOST
from littrainer.report.picture import MOST_CURVES, MOST_ENTRIES, drawing, picture
from littrainer.report.reading import read_folders
from littrainer.report.svg import COLUMNS

from .folders import LOGGED, write_state

USUAL = ["Loss", "accuracy", "Learning rate", "Gradient norm", "Speed of evaluations"]


def drawn(*folders: Path) -> Any:
    return drawing(read_folders([str(folder) for folder in folders]).runs, "auto")


def titles_of(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def texts_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.texts]


def test_the_usual_charts_and_a_dozen_others_are_drawn_and_the_rest_counted(tmp_path: Path) -> None:
    others = {f"device/{number}": float(number) for number in range(200)}
    figure = drawn(write_state(tmp_path, [*LOGGED, {"step": 4, **others}]))
    assert titles_of(figure) == [*USUAL, *list(others)[:MOST_FOREMOST]]
    assert f"{200 - MOST_FOREMOST} more metrics on the page" in texts_of(figure)


def test_of_many_evaluation_metrics_the_deciding_one_is_drawn_too(tmp_path: Path) -> None:
    many = {f"eval_class{number}": number / 100 for number in range(100)}
    folder = write_state(tmp_path, [{"step": 4, **many}], best_metric=0.77, best_global_step=4)
    titles = titles_of(drawn(folder))
    assert len(titles) == MOST_FOREMOST
    assert "class77" in titles and "class0" in titles


def test_a_run_of_few_metrics_is_drawn_whole(tmp_path: Path) -> None:
    figure = drawn(write_state(tmp_path))
    assert titles_of(figure) == USUAL
    assert not [text for text in texts_of(figure) if "on the page" in text]


def test_no_name_reaches_beyond_its_chart(tmp_path: Path) -> None:
    long = "name_" * 20_000
    entries = [*LOGGED, {"step": 4, long: 1.0, f"eval_{long}_runtime": 1.0, f"eval_{long}_loss": 2.0}]
    figure = drawn(write_state(tmp_path / ("folder" * 40), entries))
    legend = [text for legend in figure.legends for text in legend.get_texts()]
    shown = [*titles_of(figure), *texts_of(figure), *(text.get_text() for text in legend)]
    assert max(map(len, shown)) <= LONGEST_LABEL + shown[0].count("\n") + 2
    figure.draw_without_rendering()
    for axes in figure.axes:
        # Titles begin where their chart does.
        assert axes.title.get_window_extent().x1 <= figure.bbox.x1
        assert axes._left_title.get_window_extent().x1 <= axes.bbox.x1 + figure.dpi * 0.2
    for text in (*figure.texts, *legend):
        assert figure.bbox.x0 <= text.get_window_extent().x0 and text.get_window_extent().x1 <= figure.bbox.x1


def test_nothing_covers_anything_else(tmp_path: Path) -> None:
    others = {f"{'title ' * 12}{number}": float(number) for number in range(20)}
    figure = drawn(
        *(write_state(tmp_path / f"{'run' * 20}{number}", [*LOGGED, {"step": 4, **others}]) for number in range(9))
    )
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    boxes += [text.get_window_extent() for text in figure.texts] + [
        legend.get_window_extent() for legend in figure.legends
    ]
    for number, box in enumerate(boxes):
        assert not [other for other in boxes[number + 1 :] if box.overlaps(other)]


def test_curves_and_their_points_are_no_more_than_a_chart_can_show(tmp_path: Path) -> None:
    sets = {f"eval_set{number}_{name}": 1.0 for number in range(100) for name in ("runtime", "loss")}
    figure = drawn(write_state(tmp_path, [{"step": 1, **sets}, *({"step": step, "loss": 1.0} for step in range(9999))]))
    assert len(figure.axes[0].lines) == MOST_CURVES
    assert max(len(line.get_xdata()) for line in figure.axes[0].lines) <= 2 * COLUMNS + 2
    (legend,) = figure.legends
    assert len(legend.get_texts()) == MOST_ENTRIES + 1
    assert legend.get_texts()[-1].get_text() == f"{101 - MOST_ENTRIES} more on the page"


def test_half_a_letter_in_a_name_is_drawn(tmp_path: Path) -> None:
    folder = write_state(tmp_path, [{"step": 1, "m\ud800x": 1.0, "$\\frac{": 2.0}])
    assert titles_of(drawn(folder)) == ["m\\ud800x", "$\\frac{"]
    assert picture(read_folders([str(folder)]).runs, "auto", "mark").startswith(b"\x89PNG")


def test_a_source_has_one_line_style_in_all_charts_of_a_comparison_and_one_entry_in_the_legend(tmp_path: Path) -> None:
    figure = drawn(write_state(tmp_path / "first"), write_state(tmp_path / "second"))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["first", "second", "training", "evaluation"]
    charts = dict(zip(titles_of(figure), figure.axes, strict=True))
    # In the chart of the accuracy there are evaluations alone.
    styles = {line.get_linestyle() for line in charts["accuracy"].lines}
    assert styles == {legend.legend_handles[3].get_linestyle()} != {legend.legend_handles[2].get_linestyle()}
