from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from littrainer import TrainingArguments
from littrainer.callbacks.state import PATIENCE_COUNTER
from littrainer.checkpoint.run_record import write_run_record
from littrainer.checkpoint.verification import find_damage
from littrainer.cli import main
from littrainer.commands import report
from littrainer.commands.command_line import BadInput
from littrainer.commands.report_charts import MAX_METRICS
from littrainer.commands.report_folders import Run, load_folders
from littrainer.commands.report_page import MAX_ROWS
from littrainer.search.record import TrialRecord
from tests.compat.processes import facts_of
from tests.scenarios.trainers import quiet_trainer

from .report_folders import EVALUATED, LOGGED, RATE, SUMMARY, create_trials, write_search, write_state

PNG_HEAD = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "br", "wbr", "input"}
HOSTILE = "<script>alert(1)</script>\"'&</style><!--$x_"


class _Outline(HTMLParser):
    """Parser of a page's tags and text; fails if elements are not closed in order."""

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


def write_page(*folders: Path, with_picture: bool = False) -> str:
    """Write the page of these folders, and return it."""
    written = folders[0] / "page.html"
    options = [] if with_picture else ["--no-png"]
    assert main(["report", *map(str, folders), "-o", str(written), *options]) == 0
    if with_picture:
        assert (folders[0] / "page.png").read_bytes().startswith(PNG_HEAD)
    return written.read_text("utf-8")


def read_data(page: str) -> dict[str, Any]:
    """Return the data of the page's charts."""
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1])


def read_charts(page: str) -> dict[str, list[str]]:
    """Return the names of the curves in each chart."""
    return {
        chart["title"]: [", ".join(filter(None, (series["run"], series["source"]))) for series in chart["series"]]
        for chart in read_data(page)["charts"]
    }


def read_verdict(page: str) -> list[str]:
    return list(map(html.unescape, re.findall('<p class="verdict">(.*?)</p>', page)))


def read_rows(page: str) -> dict[str, list[str]]:
    rows = re.findall(r"<tr><th scope=row[^>]*>(.*?)</th>(.*?)</tr>", page.replace("<wbr>", ""))
    cells = {head: re.findall("<td[^>]*>(.*?)</td>", row) for head, row in rows}
    return {html.unescape(head): list(map(html.unescape, texts)) for head, texts in cells.items()}


def read_headings(page: str) -> list[str]:
    return list(map(html.unescape, re.findall("<h2>(.*?)</h2>", page)))


def get_complaint(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    try:
        result: Any = main(["report", *words])
    except SystemExit as end:
        result = end.code
    printed = capsys.readouterr()
    assert result == status and printed.out == ""
    assert printed.err.startswith("littrainer report: ") and printed.err.count("\n") == 1
    return printed.err


# ---- The command -----------------------------------------------------------------------------------------------------


def test_the_report_of_a_training_is_in_its_folder_and_has_its_arguments(
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
    for _ in range(2):
        assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out == 2 * f"page: {out / 'report.html'}\npicture: {out / 'report.png'}\n"
    rows = read_rows((out / "report.html").read_text())
    assert rows["load_best_model_at_end"] == ["True", "False"] and rows["Best evaluation"][0].endswith("loss at step 6")
    # The report of a checkpoint is in its parent: another file in it would differ from its manifest.
    (out / "report.html").unlink()
    assert main(["report", str(out / "checkpoint-6"), "--no-png"]) == 0
    assert (out / "report.html").is_file() and find_damage(out / "checkpoint-6") == []
    assert "load_best_model_at_end" in read_rows((out / "report.html").read_text())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "OUTPUT_DIR"),
        (["{folder}", "--output_dir", "x"], "--output_dir"),
        (["{folder}", "-o", "page.png"], "-o page.png is no place for a page; name a file that ends in .html"),
        (["{folder}/users"], "report.html exists and is not a report of littrainer"),
        (["{folder}", "-o", "{folder}/absent/page.html"], "is no place for a page"),
        (["{folder}", "-o", "{folder}/dir.html"], "is no place for a page"),
        (["{folder}/absent"], "does not exist; give the output_dir of a training, or a checkpoint in it."),
        (["{folder}/dir.html"], "called trainer.save_state()"),
        (["{folder}", "{folder}/damaged"], "trainer_state.json is not a readable trainer state"),
        (["{folder}/search"], "is not a readable record of a search"),
    ],
)
def test_bad_input_is_reported_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    write_state(tmp_path)
    (write_state(tmp_path / "users") / "report.html").write_text("a user's file")
    (tmp_path / "dir.html" / "checkpoint-2").mkdir(parents=True)
    (write_state(tmp_path / "damaged") / "trainer_state.json").write_text('{"global_step": 4, "log')
    (write_search(tmp_path / "search") / "hyperparameter_search.json").write_text("{")
    assert reason in get_complaint([word.format(folder=tmp_path) for word in words], capsys)
    assert not (tmp_path / "report.html").exists()


def test_watching_writes_the_page_at_each_change_until_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    pages: list[Any] = []

    def record_page(seconds: float) -> None:
        page = out / "report.html"
        pages.append(
            (read_data(page.read_text("utf-8"))["live"], read_verdict(page.read_text("utf-8")))
            if page.exists()
            else None
        )
        if len(pages) == 3:
            raise KeyboardInterrupt
        count = len(pages)
        write_state(out / f"checkpoint-{count}", [{"step": 1, "eval_loss": 0.5 / count, "eval_runtime": 1.0}])

    monkeypatch.setattr(report.time, "sleep", record_page)
    assert main(["report", "--watch", str(out)]) == 0
    live = report.RELOAD_INTERVAL_S
    assert pages == [
        None,
        (live, ["Best evaluation loss 0.5 at step 1"]),
        (live, ["Best evaluation loss 0.25 at step 1"]),
    ]
    # The last page does not reload.
    assert read_data((out / "report.html").read_text("utf-8"))["live"] == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"picture: {out / 'report.png'}"


def test_without_matplotlib_the_page_is_written_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(write_state(tmp_path))]) == 0
    assert (
        capsys.readouterr().out.splitlines()[1] == "picture: not written; it needs matplotlib: pip install matplotlib"
    )
    assert (tmp_path / "report.html").is_file() and not (tmp_path / "report.png").exists()


def test_a_page_is_written_without_loading_the_libraries_underneath(tmp_path: Path) -> None:
    program = (
        f"import json, sys\nfrom littrainer.cli import main\nsys.stdout, stdout = sys.stderr, sys.stdout\n"
        f"main(['report', {str(write_state(tmp_path / 'run'))!r}])\nsys.stdout = stdout\n"
        "print(json.dumps(sorted({'torch', 'lightning', 'transformers'} & set(sys.modules))))"
    )
    assert facts_of(program, tmp_path) == []


def test_the_sample_of_the_documentation_is_what_the_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `make demo` may have written the sample's checkpoint into the working directory.
    monkeypatch.chdir(Path(__file__).parents[2] / "docs" / "samples")
    written = tmp_path / "report.html"
    assert main(["report", "text_classification", "-o", str(written), "--no-png"]) == 0
    page = written.read_text("utf-8")
    assert page == Path("report.html").read_text("utf-8"), "make docs-sample writes it again"
    assert read_verdict(page) == ["Best macro_f1 0.8379 at step 532; evaluation loss flat afterwards"]
    assert len(re.sub('<script id="data".*?</script>', "", page)) < 150_000


# ---- Reading folders -------------------------------------------------------------------------------------------------


def runs_in(*folders: Path) -> list[Run]:
    return load_folders([str(folder) for folder in folders])[0]


def test_the_state_in_the_output_dir_is_read_else_that_of_the_newest_checkpoint(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        write_state(tmp_path / f"checkpoint-{step}", global_step=step)
    (tmp_path / "checkpoint-11").mkdir()
    write_state(tmp_path / "checkpoint-99-old", global_step=99)
    assert runs_in(tmp_path)[0].state.global_step == 10
    write_state(tmp_path, global_step=4)
    (run,) = runs_in(tmp_path)
    assert (run.state.global_step, run.state_file) == (4, tmp_path / "trainer_state.json")
    # A checkpoint and the file in it are the same run.
    checkpoint = tmp_path / "checkpoint-9"
    assert [run.folder for run in runs_in(checkpoint, checkpoint / "trainer_state.json")] == [checkpoint]


def test_the_best_step_is_that_of_the_best_checkpoint_in_releases_that_do_not_record_it(tmp_path: Path) -> None:
    (run,) = runs_in(write_state(tmp_path, best_model_checkpoint="/somewhere/checkpoint-2", best_metric=0.5))
    assert run.best_step == 2


def test_a_note_has_the_reason_for_missing_arguments(tmp_path: Path) -> None:
    (run,) = runs_in(write_state(tmp_path))
    assert run.arguments is None and "has no littrainer_run.json" in run.notes[0]
    for content in ("nonsense", "[]", '{"arguments": 5}'):
        (tmp_path / "littrainer_run.json").write_text(content)
        (run,) = runs_in(tmp_path)
        assert run.arguments is None and f"{tmp_path / 'littrainer_run.json'} is not readable" in run.notes[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00", "decode"),
        (b'{"global_step": 4, "log_history": 5}', "log_history is 5"),
    ],
)
def test_a_state_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "trainer_state.json").write_bytes(content)
    with pytest.raises(BadInput) as refused:
        runs_in(tmp_path)
    message = str(refused.value)
    assert str(tmp_path / "trainer_state.json") in message and reason in message and "\n" not in message


def test_the_last_log_of_lightnings_csv_logger_is_read(tmp_path: Path) -> None:
    for version in ("0", "1"):
        table = tmp_path / "logs" / f"version_{version}" / "metrics.csv"
        table.parent.mkdir(parents=True)
        table.write_text(
            f"epoch,step,train_loss,val_loss,lr-AdamW/pg1,lr-AdamW/pg2\n0,4,1.5,,0.25,0.25\n0,4,,0.{version}5,,\n1,5,,9.0,,\n"
        )
        os.utime(table, (int(version), int(version)))
    (run,) = runs_in(tmp_path)
    values = {key: [point.value for point in points] for key, points in run.history.curves.items()}
    assert values == {
        ("loss", "training"): [1.5],
        ("learning_rate", "training"): [0.25],
        ("loss", "evaluation"): [0.15, 9.0],
    }
    assert run.notes == [f"{tmp_path / 'logs' / 'version_1'} is shown, the newest of 2 logs."]
    # The last row is of `validate` after `fit`.
    assert run.state.global_step == 5
    assert [point.is_after_training for point in run.history.curves["loss", "evaluation"]] == [False, True]


STOPPED = {"EarlyStoppingCallback": {"args": {"early_stopping_patience": 2}, "attributes": {PATIENCE_COUNTER: 2}}}


@pytest.mark.parametrize(
    ("fields", "entries", "ending"),
    [
        ({}, LOGGED, "completed"),
        (
            {"max_steps": 8, "stateful_callbacks": STOPPED},
            LOGGED,
            "stopped early: the metric did not improve for 2 evaluations",
        ),
        ({"max_steps": 8}, LOGGED, "stopped before its last step, by a callback or a time limit"),
        ({"max_steps": 8}, LOGGED[:2], "not known: the newest record is of step 4 of 8"),
    ],
)
def test_a_run_has_the_reason_why_it_ended(
    tmp_path: Path, fields: dict[str, Any], entries: list[Any], ending: str
) -> None:
    page = write_page(write_state(tmp_path, entries, **fields))
    assert read_rows(page)["Ending"] == [ending]
    assert ending.startswith("stopped") == any(ending in line for line in read_verdict(page))


def test_throughput_has_a_table_and_a_line_of_advice(tmp_path: Path) -> None:
    speed = {"speed/data_seconds": 3.0, "speed/forward_seconds": 1.0, "speed/samples_per_second": 8.0}
    page = write_page(write_state(tmp_path / "run", [{"step": step, "loss": 1.0, **speed} for step in (2, 4)]))
    rows = read_rows(page)
    assert (rows["data"], rows["forward"], rows["samples per second"]) == (["6 s (75%)"], ["2 s (25%)"], ["8"])
    assert "75 % of the time is spent waiting for data: a larger dataloader_num_workers" in page
    assert not any("speed/" in title for title in read_charts(page))


@pytest.mark.parametrize(
    ("name", "content", "is_language_model"),
    [
        ("config.json", {"architectures": ["LlamaForCausalLM"]}, True),
        ("adapter_config.json", {"task_type": "CAUSAL_LM"}, True),
        ("config.json", ["nothing"], False),
    ],
)
def test_the_loss_of_a_language_model_is_shown_as_perplexity_too(
    tmp_path: Path, name: str, content: Any, is_language_model: bool
) -> None:
    (write_state(tmp_path) / name).write_text(json.dumps(content))
    (run,) = runs_in(tmp_path)
    points = run.history.curves.get(("perplexity", "evaluation"), [])
    assert [point.value for point in points] == ([math.exp(0.625)] if is_language_model else [])


# ---- The page of trainings -------------------------------------------------------------------------------------------


def test_a_run_has_its_charts_results_environment_and_changed_arguments_without_secrets(tmp_path: Path) -> None:
    entries = [{"step": 2, "eval_accuracy": 0.9375}, *LOGGED, {"step": 4, "rewards/chosen": 1.0}]
    write_state(tmp_path, entries, best_metric=0.625, best_global_step=4, max_steps=8)
    address = "https://me:secret@host/x"
    args = TrainingArguments("out", learning_rate=0.25, hub_token="secret", run_name=address, use_cpu=True)
    write_run_record(args, tmp_path)
    page = write_page(tmp_path)
    name = tmp_path.name
    assert read_charts(page) == {
        "Loss": [f"{name}, training", f"{name}, evaluation"],
        "accuracy": [f"{name}, evaluation"],
        "Learning rate": [f"{name}, training"],
        "Gradient norm before clipping": [f"{name}, training"],
        "Samples per second of evaluations": [f"{name}, evaluation"],
        "rewards/chosen": [f"{name}, training, after training"],
    }
    loss = read_data(page)["charts"][0]
    assert loss["series"][1]["best"] == [0]
    assert loss["series"][0]["x"] == {"step": [2, 4], "epoch": [0.5, 1.0], "time": [62.5, 125.0]}
    rows = read_rows(page)
    assert rows["Optimizer steps"] == ["4 of 8"] and rows["Duration"] == ["2 min 5 s"]
    assert rows["loss"] == ["0.5"] and rows["accuracy, evaluation"] == ["0.875 (highest 0.9375 at step 2)"]
    assert rows["device"] == ["cpu"] and rows["processes"] == ["1"] and rows["littrainer"] != rows["python"]
    assert rows["learning_rate"] == ["0.25", "5e-05"] and "weight_decay" not in rows
    assert "secret" not in page + (tmp_path / "littrainer_run.json").read_text()
    assert rows["run_name"] == ["https://host/x", "None"]


def test_both_evaluations_of_a_step_are_shown(tmp_path: Path) -> None:
    losses = [{"step": step, "eval_loss": loss, "eval_runtime": 1.0} for step, loss in ((2, 0.5), (4, 0.75), (4, 0.7))]
    page = write_page(write_state(tmp_path, [*losses, {"step": 4, **SUMMARY}, {"step": 4, "eval_loss": 0.5}]))
    during, afterwards = read_data(page)["charts"][0]["series"]
    assert (during["source"], during["x"]["step"], during["y"]) == ("evaluation", [2, 4, 4], [0.5, 0.75, 0.7])
    assert (afterwards["source"], afterwards["y"]) == ("evaluation, after training", [0.5])
    assert read_verdict(page) == ["Best evaluation loss 0.5 at step 2; evaluation loss rose by 40% afterwards"]


@pytest.mark.parametrize(
    ("losses", "accuracies", "verdict"),
    [
        ([1.0, 0.5, 0.505], [0.5, 0.838, 0.8], "Best accuracy 0.838 at step 2; evaluation loss flat afterwards"),
        ([1.0, 0.5, 0.4], [0.5, 0.8, 0.8], "Best accuracy 0.8 at step 2 and 3; nothing was evaluated later"),
        (
            [1.0, 0.5, math.nan],
            [0.9, 0.8, 0.8],
            "Best accuracy 0.9 at step 1; evaluation loss nan or infinite afterwards",
        ),
        ([], [], ""),
    ],
)
def test_the_verdict_names_the_best_evaluation_and_what_followed(
    tmp_path: Path, losses: list[float], accuracies: list[float], verdict: str
) -> None:
    entries = [{"step": step, "eval_loss": loss, "eval_runtime": 1.0} for step, loss in enumerate(losses, 1)]
    for entry, accuracy in zip(entries, accuracies, strict=False):
        entry["eval_accuracy"] = accuracy
    step = accuracies.index(max(accuracies)) + 1 if accuracies else None
    best = {"best_metric": max(accuracies, default=None), "best_global_step": step}
    assert read_verdict(write_page(write_state(tmp_path, entries, **best))) == ([verdict] if verdict else [])


def test_a_running_training_says_how_far_it_is(tmp_path: Path) -> None:
    entries = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": math.nan}]
    page = write_page(write_state(tmp_path, entries, global_step=2, max_steps=1000))
    assert read_verdict(page) == ["Training loss went from 2 to nan; nothing was evaluated"]
    assert "<dt>optimizer steps</dt><dd>2 of 1,000</dd>" in page and "are nan or infinite, at step 2" in page


def test_several_runs_are_compared_and_equally_good_runs_have_the_same_mark(tmp_path: Path) -> None:
    for name, rate, loss in (("one", 0.25, 0.5), ("two", 0.5, 0.625), ("three", 0.5, 0.5)):
        args = TrainingArguments("out", learning_rate=rate, warmup_steps=7, use_cpu=True)
        entries = [*LOGGED[:2], {"step": 4, "epoch": 1.0, **EVALUATED, "eval_loss": loss}]
        write_run_record(args, write_state(tmp_path / name, entries))
    page = write_page(*(tmp_path / name for name in ("one", "two", "three")))
    loss_chart = read_data(page)["charts"][0]
    looks = [tuple(series[key] for key in ("run", "source", "color", "dash")) for series in loss_chart["series"]]
    assert looks[:4] == [
        ("one", "training", 0, 0),
        ("one", "evaluation", 0, 1),
        ("two", "training", 1, 0),
        ("two", "evaluation", 1, 1),
    ]
    rows = read_rows(page)
    assert rows["learning_rate"] == ["0.25", "0.5", "0.5"] and "warmup_steps" not in rows
    assert re.search(
        r"<th scope=row>loss, evaluation</th><td class=best>0.5</td><td>0.625</td><td class=best>0.5</td>", page
    )
    assert read_verdict(page) == ["Best evaluation loss 0.5 by one and three"]
    assert "3 folders compared" in page and read_headings(page) == [
        "Training",
        "Last value of each metric",
        "Arguments that differ",
    ]


@pytest.mark.parametrize("bad", [math.nan, -1e308])
def test_values_that_are_no_usual_numbers_are_drawn_as_gaps(tmp_path: Path, bad: float) -> None:
    entries = [{"step": step, "loss": bad if step == 3 else float(step), "other": bad} for step in range(1, 6)]
    trial = TrialRecord("5", "complete", bad, {"learning_rate": bad}, {"learning_rate": RATE})
    folder = write_state(write_search(tmp_path, [*create_trials(5), trial]), entries)
    page = write_page(folder, with_picture=True)
    assert ("nan or infinite, at step 3" in page) == (not math.isfinite(bad))
    assert "Nothing was logged that could be drawn" in write_page(write_state(tmp_path, []))


def test_surplus_metrics_are_folded(tmp_path: Path) -> None:
    metrics = {f"device/{number}": float(number) for number in range(40)}
    page = write_page(write_state(tmp_path, [*LOGGED, {"step": 4, **metrics}]))
    assert list(read_charts(page))[-1] == f"device/{MAX_METRICS - 1}"
    shown, folded = page.split("<details>")
    assert "device/0" in read_rows(shown) and len(read_rows(folded)) == 40 - MAX_METRICS


def test_text_from_files_stays_text_and_a_page_loads_nothing(tmp_path: Path) -> None:
    trials = [
        TrialRecord(
            f"{HOSTILE}{number}",
            "complete",
            float(number),
            {HOSTILE: f"{HOSTILE}{number % 3}", "x" * 500: [HOSTILE, number]},
            {HOSTILE: {"kind": HOSTILE, "choices": [HOSTILE]}},
            folder=HOSTILE,
        )
        for number in range(9)
    ]
    trials.append(TrialRecord("f", "failed", error=HOSTILE))
    entries = [{"step": 1, HOSTILE: 1.0, f"eval_{HOSTILE}_runtime": 1.0, f"eval_{HOSTILE}_loss": 2.0}]
    folder = write_search(tmp_path / "a<b>&\"'c", trials, name=HOSTILE, objective_names=[HOSTILE])
    page = write_page(write_state(folder, entries), with_picture=True)
    outline = _Outline(page)
    assert HOSTILE in outline.text and folder.name in outline.text
    assert read_data(page)["charts"][0]["title"].startswith(HOSTILE)
    assert not {"b", "c", "link", "img"} & set(outline.tags) and outline.tags.count("script") == 2
    assert "default-src 'none'" in page and not re.findall(r"\b(?:src|href)=", page)


# Expression -> its value after the previous steps.
STEPS: list[tuple[str, Any]] = [
    ("charts.map(chart => chart.svg.getAttribute('role')).join()", "application,application"),
    ("document.querySelectorAll('figure path[d^=M]').length > 2", True),
    # The keyboard moves a common cursor of all charts; screen readers get its values.
    ("key('ArrowRight'), key('ArrowRight'), charts[1].cursor.querySelectorAll('line').length", 1),
    ("charts[1].read.textContent", "training 0.05"),
    ("charts[0].tip.hidden", False),
    ("document.querySelector('[aria-live]').textContent", "Step 2, training 2, evaluation (4) 8"),
    ("key('Escape'), charts[0].tip.hidden", True),
    # All charts are zoomed, and the URL has the zoom.
    ("resetButton.disabled", True),
    ("key('End'), key('+'), charts[1].view.x.low > 2", True),
    ("new URLSearchParams(location.hash.slice(1)).get('zoom').includes('training step')", True),
    ("resetButton.click(), charts[1].view.x.low < 1.1", True),
    ("choose('x', 'time'), charts[0].view.axis", "time"),
    ("choose('y', 'log'), charts[0].view.y.isLog", True),
    ("slide(0.5), charts[0].figure.querySelectorAll('path[opacity=\"0.25\"]').length", 1),
    ("location.hash.startsWith('#x=time&y=log&smooth=0.5')", True),
    # The legend hides a curve.
    ("document.querySelectorAll('.legend button')[1].click(), charts[0].view.tracks.length", 1),
    # A file with all numbers.
    ("URL.createObjectURL = blob => { window.saved = blob.size; return '#'; }, csv(), saved > 300", True),
]


def test_the_page_can_be_used_in_a_browser(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs Chromium")
    entries: list[Any] = [{"step": step, "loss": float(step), "learning_rate": 0.1 / step} for step in range(1, 9)]
    entries += [{"step": 4, "eval_loss": 8.0, "eval_runtime": 1.0}, {"step": 8, **SUMMARY}]
    page = write_page(write_state(tmp_path, entries, global_step=8))
    driver = (
        "const key = key => charts[0].svg.dispatchEvent(new KeyboardEvent('keydown', {key}));"
        "const choose = (name, value) => document.querySelector(`[name=${name}][value=${value}]`).click();"
        "const slide = value => { const range = document.querySelector('[type=range]'); range.value = value;"
        " range.dispatchEvent(new Event('input')); };"
        "const csv = () => document.querySelector('figcaption button').click();"
        f"const results = [{', '.join(f'() => ({step})' for step, _ in STEPS)}].map(step => step());"
        "document.body.replaceChildren(make('pre', {}, JSON.stringify(results)));"
    )
    end = page.rindex("</script>")
    (tmp_path / "driven.html").write_text(f"{page[:end]}{driver}{page[end:]}", "utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
    command = [browser, *options, (tmp_path / "driven.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (results,) = re.findall("<pre>(.*?)</pre>", done.stdout)
    steps = [step for step, _ in STEPS]
    assert dict(zip(steps, json.loads(html.unescape(results)), strict=True)) == dict(STEPS)


# ---- Searches --------------------------------------------------------------------------------------------------------


def test_a_search_has_charts_its_best_trial_and_all_trials(tmp_path: Path) -> None:
    page = write_page(write_search(tmp_path / "out", name="my study"), with_picture=True)
    assert read_charts(page) == {
        "objective over trials (higher is better)": ["best so far", "complete", "pruned, last value", "failed"],
        "objective over learning_rate": ["complete", "pruned, last value"],
        "objective over per_device_train_batch_size": ["complete", "pruned, last value"],
        "objective over num_train_epochs": ["complete", "pruned, last value"],
    }
    data = read_data(page)
    assert [chart["x_log"] for chart in data["charts"]] == [False, True, False, False]
    assert all(chart["series"][0 if number else 1]["best"] for number, chart in enumerate(data["charts"]))
    assert data["trials"]["search 0"][6]["name"] == "trial 6, complete"
    assert read_verdict(page) == ["Best objective 0.9: trial 6"]
    assert read_headings(page) == ["Search", "Trials, the best first"]
    rows = read_rows(page)
    assert rows["Trials"] == ["10 complete, 1 pruned, 1 failed"] and rows["Time of all trials"] == ["6 min 0 s"]
    assert rows["Best"] == ["trial 6"] and rows["Folder of the best"] == ["out/run-6"]
    trials = [row for row in rows if row.startswith("trial ")]
    assert (trials[0], trials[-2:], len(trials)) == ("trial 6", ["trial 10", "trial 11"], 12)
    assert rows["trial 11"][0] == "failed: ValueError: too large" and rows["trial 10"][0].startswith("pruned with")


def test_equally_good_trials_have_the_same_mark(tmp_path: Path) -> None:
    trials = [
        TrialRecord(str(number), "complete", value, {"x": number}) for number, value in enumerate((0.5, 0.9, 0.9))
    ]
    page = write_page(write_search(tmp_path, trials))
    assert [chart["series"][-1]["best"] for chart in read_data(page)["charts"]] == [[1, 2], [0, 1]]
    assert re.findall("<th scope=row class=best>(.*?)</th>", page) == ["trial 1", "trial 2"]
    assert read_verdict(page) == ["Best objective 0.9: trial 1 and trial 2"]


def test_two_objectives_are_drawn_each_and_against_each_other(tmp_path: Path) -> None:
    page = write_page(
        write_search(tmp_path, directions=["maximize", "minimize"], objective_names=["accuracy", "epochs"])
    )
    over_trials = ["accuracy over trials (higher is better)", "epochs over trials (lower is better)"]
    assert list(read_charts(page))[:3] == [*over_trials, "epochs against accuracy"]
    assert read_rows(page)["Best"] == ["trial 5, trial 6"]


def test_the_table_of_a_large_record_is_limited(tmp_path: Path) -> None:
    trials = [TrialRecord(str(row), "complete", row % 97 / 97, {"x": row}) for row in range(MAX_ROWS + 7)]
    trials += [TrialRecord("f", "failed"), TrialRecord("r", "running")]
    page = write_page(write_search(tmp_path, trials))
    assert "9 more trials are in" in page
    assert len([row for row in read_rows(page) if row.startswith("trial ")]) == MAX_ROWS
    assert read_rows(write_page(write_search(tmp_path, [])))["Trials"] == ["none"]
