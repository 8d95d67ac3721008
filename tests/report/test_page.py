from __future__ import annotations

import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from littrainer import TrainingArguments
from littrainer.arguments.saved_arguments import write_arguments
from littrainer.report.page import page
from littrainer.report.panels import MOST_FOREMOST
from littrainer.report.reading import read_folders
from littrainer.report.svg import COLUMNS, MOST_POINTS

from .folders import LOGGED, write_state

VOID = {"meta", "wbr", "line", "circle", "path", "polyline"}


class _Outline(HTMLParser):
    """What a page consists of; fails where its elements are not closed in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(text: str) -> _Outline:
    found = _Outline()
    found.feed(text)
    assert found.open == []
    return found


def page_of(*folders: Path, scale: str = "auto") -> str:
    return page(read_folders([str(folder) for folder in folders]).runs, scale)


def charts_of(text: str) -> dict[str, list[str]]:
    """The chart's titles, and what the legend of each says."""
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    return {
        _plain(re.search(r"<h2>(.*?)</h2>", figure, re.DOTALL)[1]): [  # type: ignore[index]
            _plain(entry) for entry in re.findall(r"<li.*?</li>", figure)
        ]
        for figure in figures
    }


def _plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", text)).strip()


def rows_of(text: str) -> dict[str, list[str]]:
    rows = re.findall(r"<tr><th scope=row>(.*?)</th>(.*?)</tr>", text)
    return {_plain(head): [_plain(cell) for cell in re.findall(r"<td>(.*?)</td>", cells)] for head, cells in rows}


def test_a_run_has_its_charts_in_order_with_their_sources(tmp_path: Path) -> None:
    entries = [*LOGGED, {"step": 4, "rewards/chosen": 1.0}]
    assert charts_of(page_of(write_state(tmp_path, entries, best_metric=0.625, best_global_step=4))) == {
        "Loss": ["training", "evaluation", "best"],
        "accuracy": ["evaluation"],
        "Learning rate": ["training"],
        "Gradient norm before clipping": ["training"],
        "Speed of evaluations samples per second": ["evaluation"],
        "rewards/chosen": ["training"],
    }


def test_several_runs_are_told_apart_by_name_and_their_sources_by_line(tmp_path: Path) -> None:
    folders = [write_state(tmp_path / name) for name in ("one", "two")]
    charts = charts_of(page_of(*folders))
    assert charts["Loss"] == ["one", "two", "training", "evaluation"]
    assert charts["Learning rate"] == ["one", "two"]


def test_results_and_changed_arguments_are_told(tmp_path: Path) -> None:
    write_state(tmp_path, best_metric=0.625, best_global_step=4, max_steps=8)
    write_arguments(TrainingArguments("out", learning_rate=0.25, use_cpu=True), tmp_path / "training_args.bin")
    rows = rows_of(page_of(tmp_path))
    assert rows["Optimizer steps"] == ["4 of 8"]
    assert rows["losslast logged"] == ["0.5"]
    assert rows["accuracy, evaluationlast logged"] == ["0.875"]
    assert rows["Duration of training"] == ["2 min 5 s"]
    assert rows["Training samples per second"] == ["64"]
    assert rows["learning_rate"] == ["0.25", "5e-05"]
    assert "weight_decay" not in rows


def test_arguments_that_differ_between_runs_are_told_beside_each_other(tmp_path: Path) -> None:
    for name, rate in (("one", 0.25), ("two", 0.5)):
        write_state(tmp_path / name)
        args = TrainingArguments("out", learning_rate=rate, warmup_steps=7, use_cpu=True)
        write_arguments(args, tmp_path / name / "training_args.bin")
    text = page_of(tmp_path / "one", tmp_path / "two")
    differing, common = text.split("<details>")
    assert rows_of(differing)["learning_rate"] == ["0.25", "0.5"]
    assert "warmup_steps" not in rows_of(differing)
    assert rows_of(common)["warmup_steps"] == ["7", "0"]
    assert "learning_rate" not in rows_of(common)


def test_a_page_loads_nothing_and_runs_no_script_but_its_own(tmp_path: Path) -> None:
    text = page_of(write_state(tmp_path))
    found = outline(text)
    policy = next(attrs["content"] for tag, attrs in found.tags if attrs.get("http-equiv"))
    assert policy is not None and policy.startswith(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-"
    )
    assert not [tag for tag, attrs in found.tags if {"src", "href"} & set(attrs)]
    assert "http" not in re.sub(r"http-equiv=", "", text)
    assert "url(" not in text and "@import" not in text


HOSTILE = "<script>alert(1)</script>\"'&</style><!--"


def test_text_from_files_stays_text(tmp_path: Path) -> None:
    folder = tmp_path / "a<b>&\"'c"
    entries = [{"step": 1, HOSTILE: 1.0, f"eval_{HOSTILE}_runtime": 1.0, f"eval_{HOSTILE}_loss": 2.0, "odd": "\ud800"}]
    write_state(folder, entries, best_model_checkpoint=HOSTILE, best_metric=2.0)
    args = TrainingArguments("out", use_cpu=True, run_name=HOSTILE)
    write_arguments(args, folder / "training_args.bin")
    for text in (page_of(folder), page_of(folder, write_state(tmp_path / "other"))):
        found = outline(text)
        assert sum(tag == "script" for tag, _ in found.tags) == 2
        assert not [tag for tag, _ in found.tags if tag in ("b", "c")]
        assert HOSTILE in found.text and folder.name in found.text
        text.encode("utf-8")


def test_a_history_that_holds_nothing_says_so(tmp_path: Path) -> None:
    text = page_of(write_state(tmp_path, []))
    outline(text)
    assert charts_of(text) == {}
    assert "Nothing was logged that could be drawn" in text


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 10**400])
def test_values_that_are_not_finite_leave_a_gap_and_a_mark(tmp_path: Path, bad: Any) -> None:
    entries = [{"step": step, "loss": bad if step == 3 else float(step)} for step in range(1, 6)]
    text = page_of(write_state(tmp_path, entries))
    figure = re.search(r"<figure.*?</figure>", text, re.DOTALL)
    assert figure is not None
    lines = re.findall(r'<polyline points="([^"]*)"/>', figure[0].split("</ul>")[1])
    assert [len(line.split()) for line in lines] == [2, 2]
    assert figure[0].count('class="missing"') == 1
    assert "NaN" not in text and "nan or infinite, at step 3" in text


def test_a_metric_without_any_finite_value_has_no_scale(tmp_path: Path) -> None:
    text = page_of(write_state(tmp_path, [{"step": 1, "loss": math.nan}, {"step": 2, "loss": math.nan}]))
    assert text.count('class="missing"') == 2
    assert 'class="grid"' not in text


def test_a_long_history_is_thinned_and_keeps_its_extremes(tmp_path: Path) -> None:
    entries = [{"step": step, "loss": 1.0 + (step == 7777) * 4.0 - (step == 3333) * 0.75} for step in range(20_000)]
    text = page_of(write_state(tmp_path, entries), scale="linear")
    data = json.loads(re.search(r'id="charts">(.*?)</script>', text)[1])  # type: ignore[index]
    points = {step: value for step, value, _ in data[0]["curves"][0]["points"]}
    assert len(points) <= 2 * COLUMNS + 4
    assert (points[7777], points[3333], points[0], points[19_999]) == ("5", "0.25", "1", "1")


def points_of(text: str) -> list[list[list[Any]]]:
    """The points behind each curve of a page."""
    data = json.loads(re.search(r'id="charts">(.*?)</script>', text)[1])  # type: ignore[index]
    return [curve["points"] for chart in data for curve in chart["curves"]]


def test_many_long_histories_share_the_room_of_a_page(tmp_path: Path) -> None:
    names = [f"device/{number}" for number in range(200)]
    entries = [{"step": step, **dict.fromkeys(names, float(step % 7 - 6 * (step == 255)))} for step in range(400)]
    text = page_of(write_state(tmp_path, entries))
    curves = points_of(text)
    assert len(curves) == 200
    assert sum(map(len, curves)) <= MOST_POINTS + 2 * len(curves)
    lines = re.findall(r'<polyline points="([^"]*)"', "".join(re.findall(r"</ul><svg.*?</svg>", text)))
    assert sum(len(line.split()) for line in lines) == sum(map(len, curves))
    assert all([255, "-3"] in [point[:2] for point in points] for points in curves)


def test_of_gaps_that_cannot_be_told_apart_one_is_marked(tmp_path: Path) -> None:
    entries = [{"step": step, "loss": math.nan if step % 2 else 1.0} for step in range(20_000)]
    text = page_of(write_state(tmp_path, entries))
    assert text.count('class="missing"') <= COLUMNS + 2


def test_more_metrics_than_are_looked_at_are_folded_away(tmp_path: Path) -> None:
    others = {f"device/{number}": float(number) for number in range(40)}
    text = page_of(write_state(tmp_path, [*LOGGED, {"step": 4, **others}]))
    outline(text)
    rest = 40 - MOST_FOREMOST
    assert list(charts_of(text))[-40:] == list(others)
    at_once, charts, results = text.split("<details>")
    assert list(charts_of(at_once))[-1] == f"device/{MOST_FOREMOST - 1}"
    assert f"<summary>{rest} more charts</summary>" in charts and len(charts_of(charts)) == rest
    assert f"<summary>{rest} more results</summary>" in results and len(rows_of(results)) == rest
    assert "device/0last logged" in rows_of(charts)


def test_long_names_are_shortened_and_told_whole_under_the_pointer(tmp_path: Path) -> None:
    long = "a" * 100_000
    entries = [{"step": 1, long: 1.0, f"eval_{long}_runtime": 1.0, f"eval_{long}_loss": math.nan, long + "b": "text"}]
    text = page_of(write_state(tmp_path, entries))
    found = outline(text)
    assert (
        max(len(line) for line in re.sub(r"<[^>]*>", "\n", text).splitlines() if "aaa" in line and "{" not in line)
        < 200
    )
    assert long not in found.text
    assert {"title": long} in [attrs for _, attrs in found.tags]
    assert all(len(attrs.get("aria-label") or "") < 200 for _, attrs in found.tags)


def test_half_a_letter_in_any_name_can_be_written(tmp_path: Path) -> None:
    name = "m\ud800x"
    text = page_of(
        write_state(tmp_path, [{"step": 1, name: 1.0, f"eval_{name}_runtime": 1.0, f"eval_{name}_loss": 2.0}])
    )
    assert b"m\\ud800x" in text.encode("utf-8")


def test_the_same_folder_gives_the_same_page(tmp_path: Path) -> None:
    assert page_of(write_state(tmp_path)) == page_of(tmp_path)


def test_more_runs_than_colours_are_all_drawn(tmp_path: Path) -> None:
    folders = [write_state(tmp_path / f"run{number}") for number in range(12)]
    text = page_of(*folders)
    outline(text)
    assert len(charts_of(text)["Learning rate"]) == 12
