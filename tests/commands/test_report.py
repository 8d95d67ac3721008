from __future__ import annotations

import html
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from littrainer import TrainingArguments
from littrainer.checkpoint.arguments_file import write_run_record
from littrainer.checkpoint.verification import damage_in
from littrainer.cli import main
from littrainer.commands.report_folders import NothingToReport, Run, read_folders
from littrainer.search.record import TrialRecord
from tests.compat.processes import facts_of
from tests.scenarios.trainers import quiet_trainer

from .report_folders import LOGGED, RATE, some_trials, write_search, write_state

pytest.importorskip("matplotlib")
from littrainer.commands.report_page import MOST_METRICS, MOST_ROWS

PNG_HEAD = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "img", "br"}
HOSTILE = "<script>alert(1)</script>\"'&</style><!--$x_"


class _Outline(HTMLParser):
    """What a page consists of; fails if its elements are not closed in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(*folders: Path) -> str:
    """The page about these folders, whose picture has been drawn."""
    written = folders[0] / "page.html"
    assert main(["report", *map(str, folders), "-o", str(written)]) == 0
    assert (folders[0] / "page.png").read_bytes().startswith(PNG_HEAD)
    return written.read_text("utf-8")


def rows_of(page: str) -> dict[str, list[str]]:
    rows = re.findall(r"<tr><th scope=row>(.*?)</th>(.*?)</tr>", page)
    return {html.unescape(head): list(map(html.unescape, re.findall("<td>(.*?)</td>", cells))) for head, cells in rows}


def headings_of(page: str) -> list[str]:
    return list(map(html.unescape, re.findall("<h2>(.*?)</h2>", page)))


def charts_drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Filled when a picture is drawn: the title of each chart, and the labels of its lines."""
    from matplotlib.figure import Figure

    found: dict[str, list[str]] = {}
    save = Figure.savefig

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        for axes in self.get_axes():
            if axes.get_title(loc="left"):
                found[axes.get_title(loc="left")] = axes.get_legend_handles_labels()[1]
        return save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", look)
    return found


def complaint_of(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    try:
        found: Any = main(["report", *words])
    except SystemExit as end:
        found = end.code
    printed = capsys.readouterr()
    assert found == status and printed.out == ""
    assert printed.err.startswith("littrainer report: ") and printed.err.count("\n") == 1
    return printed.err


# ---- The command -----------------------------------------------------------------------------------------------------


def test_a_training_is_reported_beside_its_model_with_its_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    trainer = quiet_trainer(
        out,
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
    )
    trainer.train()
    trainer.save_state()
    capsys.readouterr()
    # A report may be written again.
    for _ in range(2):
        assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out == 2 * f"page: {out / 'report.html'}\npicture: {out / 'report.png'}\n"
    rows = rows_of((out / "report.html").read_text())
    assert rows["load_best_model_at_end"] == ["True", "False"] and rows["Best evaluation"][0].endswith("loss at step 6")
    # One more file in a checkpoint would make it differ from its manifest.
    (out / "report.html").unlink()
    assert main(["report", str(out / "checkpoint-6"), "--no-png"]) == 0
    assert (out / "report.html").is_file() and damage_in(out / "checkpoint-6") == []
    assert "load_best_model_at_end" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "OUTPUT_DIR"),
        (["{folder}", "--output_dir", "x"], "--output_dir"),
        (["{folder}", "-o", "page.png"], "ends in .html"),
        (["{folder}/own"], "report.html is there and is no report of littrainer"),
        (["{folder}", "-o", "{folder}/absent/page.html"], "which is no folder"),
        (["{folder}", "-o", "{folder}/dir.html"], "is a folder"),
        (["{folder}/absent"], "does not exist; give the output_dir of a training, or a checkpoint in it."),
        (["{folder}/dir.html"], "called trainer.save_state()"),
        (["{folder}", "{folder}/damaged"], "trainer_state.json is not a readable trainer state"),
        (["{folder}/search"], "is not a readable record of a search"),
    ],
)
def test_what_cannot_be_reported_is_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    write_state(tmp_path)
    (write_state(tmp_path / "own") / "report.html").write_text("the user's own")
    (tmp_path / "dir.html" / "checkpoint-2").mkdir(parents=True)
    (write_state(tmp_path / "damaged") / "trainer_state.json").write_text('{"global_step": 4, "log')
    (write_search(tmp_path / "search") / "hyperparameter_search.json").write_text("{")
    assert reason in complaint_of([word.format(folder=tmp_path) for word in words], capsys)
    assert not (tmp_path / "report.html").exists()


def test_a_page_is_written_without_loading_the_libraries_underneath(tmp_path: Path) -> None:
    program = (
        f"import json, sys\nfrom littrainer.cli import main\nsys.stdout, kept = sys.stderr, sys.stdout\n"
        f"main(['report', {str(write_state(tmp_path / 'run'))!r}])\nsys.stdout = kept\n"
        "print(json.dumps(sorted({'torch', 'lightning', 'transformers'} & set(sys.modules))))"
    )
    assert facts_of(program, tmp_path) == []


# ---- Reading folders -------------------------------------------------------------------------------------------------


def runs_in(*folders: Path) -> list[Run]:
    return read_folders([str(folder) for folder in folders])[0]


def test_the_state_in_the_output_dir_is_read_else_that_of_the_newest_checkpoint(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        write_state(tmp_path / f"checkpoint-{step}", global_step=step)
    (tmp_path / "checkpoint-11").mkdir()
    write_state(tmp_path / "checkpoint-99-old", global_step=99)
    assert runs_in(tmp_path)[0].state.global_step == 10
    write_state(tmp_path, global_step=4)
    (run,) = runs_in(tmp_path)
    assert (run.state.global_step, run.state_file) == (4, tmp_path / "trainer_state.json")
    # A checkpoint, or the file itself, may be given, and what is given twice is read once.
    checkpoint = tmp_path / "checkpoint-9"
    assert [run.folder for run in runs_in(checkpoint, checkpoint / "trainer_state.json")] == [checkpoint]


def test_the_best_checkpoint_is_found_where_the_run_was_moved_to(tmp_path: Path) -> None:
    recorded = "/somewhere/else/checkpoint-2"
    write_state(tmp_path, best_model_checkpoint=recorded, best_metric=0.5)
    assert runs_in(tmp_path)[0].best_checkpoint == f"{recorded} (not there)"
    (tmp_path / "checkpoint-2").mkdir()
    (run,) = runs_in(tmp_path)
    # Releases before 4.53 do not record the step.
    assert run.best_checkpoint == str(tmp_path / "checkpoint-2") and run.best_step == 2


def test_arguments_that_are_not_known_are_noted_with_the_reason(tmp_path: Path) -> None:
    (run,) = runs_in(write_state(tmp_path))
    assert run.arguments is None and "there is no littrainer_run.json beside" in run.notes[0]
    for content in ("nonsense", "[]", '{"arguments": 5}'):
        (tmp_path / "littrainer_run.json").write_text(content)
        (run,) = runs_in(tmp_path)
        assert run.arguments is None and f"{tmp_path / 'littrainer_run.json'} is not readable" in run.notes[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe\x00", "decode"),
        (b"[1, 2]", "no object"),
        (b'{"global_step": ' + b"[" * 100_000, "recursion"),
    ],
)
def test_a_state_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "trainer_state.json").write_bytes(content)
    with pytest.raises(NothingToReport) as refused:
        runs_in(tmp_path)
    message = str(refused.value)
    assert str(tmp_path / "trainer_state.json") in message and reason in message and "\n" not in message


# ---- The page and the picture of trainings ---------------------------------------------------------------------------


def test_a_run_has_its_charts_results_and_changed_arguments_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = charts_drawn(monkeypatch)
    entries = [{"step": 2, "eval_accuracy": 0.9375}, *LOGGED, {"step": 4, "rewards/chosen": 1.0}]
    write_state(tmp_path, entries, best_metric=0.625, best_global_step=4, max_steps=8)
    address = "https://me:secret@host/x"
    args = TrainingArguments("out", learning_rate=0.25, hub_token="secret", run_name=address, use_cpu=True)
    write_run_record(args, tmp_path)
    page = page_of(tmp_path)
    assert drawn == {
        "Loss": ["training", "evaluation", "best"],
        "accuracy": ["evaluation"],
        "Learning rate": ["training"],
        "Gradient norm before clipping": ["training"],
        "Samples per second of evaluations": ["evaluation"],
        "rewards/chosen": ["training"],
    }
    rows = rows_of(page)
    assert rows["Optimizer steps"] == ["4 of 8"] and rows["Duration of training"] == ["2 min 5 s"]
    assert rows["loss"] == ["0.5"] and rows["accuracy, evaluation"] == ["0.875 (highest 0.9375 at step 2)"]
    assert rows["learning_rate"] == ["0.25", "5e-05"] and "weight_decay" not in rows
    assert "secret" not in page + (tmp_path / "littrainer_run.json").read_text()
    assert rows["run_name"] == ["https://host/x", "None"]


def test_several_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = charts_drawn(monkeypatch)
    for name, rate in (("one", 0.25), ("two", 0.5)):
        args = TrainingArguments("out", learning_rate=rate, warmup_steps=7, use_cpu=True)
        write_run_record(args, write_state(tmp_path / name))
    page = page_of(tmp_path / "one", tmp_path / "two")
    assert drawn["Loss"] == ["one, training", "one, evaluation", "two, training", "two, evaluation"]
    rows = rows_of(page)
    assert rows["learning_rate"] == ["0.25", "0.5"] and rows["loss"] == ["0.5", "0.5"] and "warmup_steps" not in rows
    assert "2 folders compared" in page and headings_of(page) == ["Results", "Arguments that differ"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e308])
def test_values_that_are_no_usual_numbers_are_drawn_as_gaps(tmp_path: Path, bad: float) -> None:
    entries = [{"step": step, "loss": bad if step == 3 else float(step), "other": bad} for step in range(1, 6)]
    trial = TrialRecord("5", "complete", bad, {"learning_rate": bad}, {"learning_rate": RATE})
    page = page_of(write_state(write_search(tmp_path, [*some_trials(5), trial]), entries))
    assert ("nan or infinite, at step 3" in page) == (not math.isfinite(bad))
    assert "Nothing was logged that could be drawn" in page_of(write_state(tmp_path, []))


def test_more_metrics_than_are_looked_at_are_folded_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = charts_drawn(monkeypatch)
    others = {f"device/{number}": float(number) for number in range(40)}
    page = page_of(write_state(tmp_path, [*LOGGED, {"step": 4, **others}]))
    assert list(drawn)[-1] == f"device/{MOST_METRICS - 1}"
    shown, folded = page.split("<details>")
    assert "device/0" in rows_of(shown) and len(rows_of(folded)) == 40 - MOST_METRICS


def test_text_from_files_stays_text_and_a_page_loads_nothing(tmp_path: Path) -> None:
    trials = [
        TrialRecord(
            f"{HOSTILE}{number}",
            "complete",
            float(number),
            {HOSTILE: f"{HOSTILE}{number % 3}", "odd \ud800": number, "x" * 500: [HOSTILE, number]},
            {HOSTILE: {"kind": HOSTILE, "choices": [HOSTILE]}, "odd \ud800": {"kind": "float", "low": HOSTILE}},
            folder=HOSTILE,
        )
        for number in range(9)
    ]
    trials.append(TrialRecord("f", "failed", error=HOSTILE))
    entries = [{"step": 1, HOSTILE: 1.0, f"eval_{HOSTILE}_runtime": 1.0, f"eval_{HOSTILE}_loss": 2.0, "m\ud800x": 1.0}]
    folder = write_search(tmp_path / "a<b>&\"'c", trials, name=HOSTILE, objective_names=[HOSTILE])
    page = page_of(write_state(folder, entries))
    found = _Outline(page)
    assert HOSTILE in found.text and "m\\ud800x" in found.text and folder.name in found.text
    assert not {"script", "b", "c", "link"} & set(found.tags)
    assert "default-src 'none'" in page and re.findall('src="([^,]*),', page) == ["data:image/png;base64"]


# ---- Searches --------------------------------------------------------------------------------------------------------


def test_a_search_is_shown_by_its_charts_its_best_trial_and_all_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = charts_drawn(monkeypatch)
    page = page_of(write_search(tmp_path / "out", name="my study"))
    assert drawn == {
        "objective over trials (higher is better)": ["best so far", "complete", "pruned, last value", "best", "failed"],
        "objective over learning_rate": [],
        "objective over per_device_train_batch_size": [],
        "objective over num_train_epochs": [],
    }
    assert headings_of(page) == ["Search", "Best trial: 6", "Trials, the best first"]
    rows = rows_of(page)
    assert rows["Trials"] == ["10 complete, 1 pruned, 1 failed"] and rows["Time of all trials"] == ["6 min 0 s"]
    assert rows["learning_rate"] == ["0.001", "1e-05 to 0.1, by powers"]
    trials = [row for row in rows if row.startswith("trial ")]
    assert (trials[0], trials[-2:], len(trials)) == ("trial 6", ["trial 10", "trial 11"], 12)
    assert rows["trial 11"][0] == "failed: ValueError: too large" and rows["trial 10"][0].startswith("pruned with")


def test_two_objectives_are_drawn_each_and_against_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = charts_drawn(monkeypatch)
    page = page_of(write_search(tmp_path, directions=["maximize", "minimize"], objective_names=["accuracy", "epochs"]))
    charts = [
        "accuracy over trials (higher is better)",
        "epochs over trials (lower is better)",
        "epochs against accuracy",
    ]
    assert list(drawn)[:3] == charts
    assert rows_of(page)["Best"] == ["trial 5, trial 6"] and not [
        title for title in headings_of(page) if "Best" in title
    ]


def test_a_large_record_gives_a_table_of_bounded_length(tmp_path: Path) -> None:
    trials = [TrialRecord(str(row), "complete", row % 97 / 97, {"x": row}) for row in range(MOST_ROWS + 7)]
    trials += [TrialRecord("f", "failed", error="ValueError: no"), TrialRecord("r", "running")]
    page = page_of(write_search(tmp_path, trials))
    assert f"1 of {len(trials)} trials were running" in page and "The first failure: ValueError: no" in page
    assert rows_of(page_of(write_search(tmp_path, [])))["Trials"] == ["none"]
    assert (
        "9 more trials are in" in page and len([row for row in rows_of(page) if row.startswith("trial ")]) == MOST_ROWS
    )
