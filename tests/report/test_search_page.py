from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from littrainer.report.page import page
from littrainer.report.reading import read_folders
from littrainer.report.search_page import MOST_ROWS
from littrainer.search.record import TrialRecord

from .folders import write_state
from .search_folders import RATE, some_trials, write_search
from .test_page import HOSTILE, outline


def page_of(*folders: Path) -> str:
    found = read_folders([str(folder) for folder in folders])
    return page(found.runs, "auto", found.searches)


def headings_of(text: str) -> list[str]:
    return [re.sub("<.*?>", "", each).strip() for each in re.findall("<h2.*?</h2>", text)]


def told_in(text: str) -> Any:
    return json.loads(re.search('<script type="application/json" id="trials">(.*?)</script>', text).group(1))  # type: ignore[union-attr]


def test_a_search_is_shown_by_its_charts_its_best_trial_and_all_trials(tmp_path: Path) -> None:
    text = page_of(write_search(tmp_path / "out", name="my study"))
    assert headings_of(text) == [
        "objective over trials higher is better",
        "Importance of parameters from 10 complete trials: rough with so few",
        "Complete trials across their parameters",
        "Best trial: 6",
        "Trials, the best first",
    ]
    said = outline(text).text
    assert "10 complete, 1 pruned, 1 failed" in said
    assert "my study" in said and "6 min" in said
    assert text.count("<tr>") == 1 + 3 + 1 + 12
    assert said.index("trial 6") < said.index("trial 11")
    assert "ValueError: too large" in said


def test_every_ended_trial_has_a_mark_and_every_complete_one_a_line(tmp_path: Path) -> None:
    text = page_of(write_search(tmp_path))
    tags = outline(text).tags
    marked = [(str(tag.get("class")), int(str(tag["data-trial"]))) for _, tag in tags if "data-trial" in tag]
    assert sorted(trial for kind, trial in marked if "spot" in kind) == list(range(12))
    assert sorted(trial for kind, trial in marked if "thread" in kind) == list(range(10))


def test_what_the_pointer_tells_names_the_trial_and_its_values(tmp_path: Path) -> None:
    (trials,) = told_in(page_of(write_search(tmp_path)))
    assert trials["6"][0] == "trial 6, complete"
    assert dict(trials["6"][1])["per_device_train_batch_size"] == "4"
    assert trials["10"] == ["trial 10, pruned", trials["10"][1]] and trials["10"][1][0][0] == "at step 20"


def test_two_objectives_are_drawn_each_and_against_each_other(tmp_path: Path) -> None:
    text = page_of(write_search(tmp_path, directions=["maximize", "minimize"], objective_names=["accuracy", "epochs"]))
    found = headings_of(text)
    assert found[0] == "accuracy over trials higher is better"
    assert found[1] == "epochs over trials lower is better"
    assert "epochs against accuracy" in found
    assert any(each.startswith("Importance of parameters for epochs") for each in found)
    assert not any(each.startswith("Best trial") for each in found)


def test_a_training_in_the_same_folder_follows_the_search(tmp_path: Path) -> None:
    text = page_of(write_state(write_search(tmp_path / "out")))
    found = headings_of(text)
    assert found.index("Trials, the best first") < found.index("Training") < found.index("Results")
    assert "<h1>out</h1>" in text
    charts = [tag["data-chart"] for _, tag in outline(text).tags if "data-chart" in tag]
    assert charts and len(json.loads(re.search('id="charts">(.*?)</script>', text).group(1))) == len(charts)  # type: ignore[union-attr]


def test_several_folders_are_shown_one_after_the_other(tmp_path: Path) -> None:
    text = page_of(write_search(tmp_path / "a"), write_search(tmp_path / "b"), write_state(tmp_path / "c"))
    outline(text)
    assert "<h1>2 searches and 1 training</h1>" in text
    assert len(told_in(text)) == 2
    assert [each for each in headings_of(text) if each in ("a", "b", "Training")] == ["a", "b", "Training"]


def test_a_page_without_a_search_holds_nothing_of_one(tmp_path: Path) -> None:
    text = page_of(write_state(tmp_path))
    assert 'id="trials"' not in text and "data-search" not in text


def test_text_of_a_record_stays_text(tmp_path: Path) -> None:
    trials = [
        TrialRecord(
            f"{HOSTILE}{number}",
            "complete",
            float(number),
            {HOSTILE: f"{HOSTILE}{number % 3}", "odd \ud800": number, "x" * 500: [HOSTILE, number]},
            {
                HOSTILE: {"kind": HOSTILE, "choices": [HOSTILE, HOSTILE + "1"]},
                "odd \ud800": {"kind": "float", "low": HOSTILE},
            },
            folder=HOSTILE,
        )
        for number in range(9)
    ]
    trials.append(TrialRecord("f", "failed", error=HOSTILE))
    about = {"backend": HOSTILE, "name": HOSTILE, "objective_names": [HOSTILE]}
    folder = write_search(tmp_path / "a<b>&\"'c", trials, **about)
    text = page_of(folder)
    found = outline(text)
    assert sum(tag == "script" for tag, _ in found.tags) == 3
    assert not [tag for tag, _ in found.tags if tag in ("b", "c")]
    assert HOSTILE in found.text
    assert json.dumps(told_in(text))
    text.encode("utf-8")


@pytest.mark.parametrize("value", [0.0, 1e308, -1e308, 5e-324, math.inf])
def test_objectives_of_any_size_are_drawn(tmp_path: Path, value: float) -> None:
    trials = [*some_trials(5), TrialRecord("5", "complete", value, {"learning_rate": value}, {"learning_rate": RATE})]
    text = page_of(write_search(tmp_path, trials))
    assert not re.search(r'[xy]="(nan|inf)', text)
    assert "nan," not in text.split("<script")[0]


def test_a_search_without_a_complete_trial_says_so(tmp_path: Path) -> None:
    text = page_of(write_search(tmp_path, [TrialRecord("0", "failed", error="ValueError: no")]))
    assert "No trial is complete. The first failure: ValueError: no" in outline(text).text
    assert "No trial had ended" in outline(page_of(write_search(tmp_path, []))).text


def test_a_large_record_gives_a_page_of_bounded_size(tmp_path: Path) -> None:
    names = [f"parameter {number}" for number in range(30)]
    trials = [
        TrialRecord(str(row), "complete", row % 97 / 97, {name: f"{name} {row % 60}" for name in names})
        for row in range(700)
    ]
    text = page_of(write_search(tmp_path, trials))
    assert text.count("<tr>") <= MOST_ROWS + 2 + 30
    assert f"{700 - MOST_ROWS} more trials and 20 more parameters are in" in outline(text).text
    assert len(text) < 2 * 2**20
