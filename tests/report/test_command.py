from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from littrainer.checkpoint.verification import damage_in
from littrainer.cli import main
from littrainer.report import command
from tests.compat.processes import facts_of
from tests.scenarios.trainers import quiet_trainer

from .folders import write_state
from .search_folders import write_search

PNG_HEAD = b"\x89PNG\r\n\x1a\n"
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def complaint_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status = main(["report", *words])
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.startswith("littrainer report: ") and printed.err.count("\n") == 1
    return printed.err


def test_a_training_is_reported_beside_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet_trainer(
        tmp_path / "out",
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
    )
    trainer.train()
    trainer.save_state()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "out"), "--no-png"]) == 0
    assert capsys.readouterr().out == f"page: {tmp_path / 'out' / 'report.html'}\n"
    text = (tmp_path / "out" / "report.html").read_text()
    assert ">Loss</h2>" in text and "best eval_loss" not in text and "best loss" in text
    assert "load_best_model_at_end" in text and "The arguments are not known" not in text


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_several_folders_are_compared_in_a_page_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [str(write_state(tmp_path / name)) for name in ("_one", "two $x_", "three \N{SNOWMAN}")]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *folders, "--scale", "log"]) == 0
    assert capsys.readouterr().out == "page: report.html\npicture: report.png\n"
    drawn = Path("report.png").read_bytes()
    assert drawn.startswith(PNG_HEAD)
    # A report may be written again.
    assert main(["report", *folders]) == 0


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_a_picture_of_nothing_and_of_bad_numbers_is_drawn_too(tmp_path: Path) -> None:
    bad: list[Any] = [
        {"step": 1, "loss": float("nan")},
        {"step": 2, "loss": 1e308, "other": -1e308},
        {"step": 3, "x": 0},
    ]
    for name, entries in (("empty", []), ("bad", bad)):
        folder = write_state(tmp_path / name, entries)
        assert main(["report", str(folder)]) == 0
        assert (folder / "report.png").read_bytes().startswith(PNG_HEAD)


def test_a_folder_with_only_the_record_of_a_search_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_search(tmp_path / "out")
    for given in (folder, folder / "hyperparameter_search.json"):
        assert main(["report", str(given), "--no-png"]) == 0
        assert capsys.readouterr().out == f"page: {folder / 'report.html'}\n"
    assert "objective over trials" in (folder / "report.html").read_text()


def test_a_damaged_record_beside_a_training_is_a_note_and_alone_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_state(write_search(tmp_path / "out"))
    record = folder / "hyperparameter_search.json"
    record.write_text(record.read_text()[:-20])
    assert main(["report", str(folder), "--no-png"]) == 0
    assert "hyperparameter_search.json is not a readable record of a search" in (folder / "report.html").read_text()
    (folder / "trainer_state.json").unlink()
    capsys.readouterr()
    assert "is not a readable record of a search" in complaint_of([str(folder)], capsys)


def test_without_matplotlib_the_page_is_written_and_told_how_to_get_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "can_draw", lambda: False)
    assert main(["report", str(write_state(tmp_path))]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"page: {tmp_path / 'report.html'}\n"
    assert "pip install 'littrainer[report]'" in printed.err
    assert not (tmp_path / "report.png").exists()


def test_the_output_may_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_state(tmp_path / "run")
    assert main(["report", str(folder), "--no-png", "-o", str(tmp_path / "mine.html")]) == 0
    assert (tmp_path / "mine.html").is_file() and not (folder / "report.html").exists()


def test_a_report_on_a_checkpoint_leaves_the_checkpoint_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = quiet_trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    assert main(["report", str(tmp_path / "checkpoint-2"), "--no-png"]) == 0
    assert (tmp_path / "report.html").is_file()
    assert damage_in(tmp_path / "checkpoint-2") == []


def test_a_file_that_is_no_report_is_not_replaced_unless_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_state(tmp_path)
    (folder / "report.html").write_text("the user's own")
    complaint = complaint_of([str(folder), "--no-png"], capsys)
    assert f"{folder / 'report.html'} is there and is no report of littrainer" in complaint
    assert (folder / "report.html").read_text() == "the user's own"
    assert main(["report", str(folder), "--no-png", "-o", str(folder / "report.html")]) == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "OUTPUT_DIR"),
        (["{folder}", "--output_dir", "x"], "--output_dir"),
        (["{folder}", "--scale", "cubic"], "cubic"),
        (["{folder}", "-o", "page.png"], "ends in .html"),
        (["{folder}", "-o", "{folder}/absent/page.html"], "which is no folder"),
        (["{folder}", "-o", "{folder}/dir.html"], "is a folder"),
        (["{folder}/absent"], "does not exist"),
        (["{folder}/damaged"], "trainer_state.json is not a readable trainer state"),
    ],
)
def test_what_cannot_be_reported_is_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    write_state(tmp_path)
    (tmp_path / "dir.html").mkdir()
    (write_state(tmp_path / "damaged") / "trainer_state.json").write_text('{"global_step": 4, "log')
    assert reason in complaint_of([word.format(folder=tmp_path) for word in words], capsys)
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, content: Any) -> None:
        raise OSError(28, "No space left on device; nothing was written", str(path))

    monkeypatch.setattr(command, "write_whole", fail)
    complaint = complaint_of([str(write_state(tmp_path))], capsys)
    assert f"{tmp_path / 'report.html'} cannot be written: No space left on device" in complaint


def test_the_help_tells_of_folders_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["report", "--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("OUTPUT_DIR", "--output FILE.html", "--scale", "--no-png"))


def test_a_page_is_written_without_loading_the_libraries_underneath(tmp_path: Path) -> None:
    folder = write_state(tmp_path / "run")
    program = (
        f"import json, sys\nfrom littrainer.cli import main\nsys.stdout, kept = sys.stderr, sys.stdout\n"
        f"main(['report', {str(folder)!r}, '--no-png'])\nsys.stdout = kept\n"
        "heavy = {'torch', 'lightning', 'transformers', 'numpy', 'matplotlib'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))"
    )
    assert facts_of(program, tmp_path) == []


def test_a_damaged_file_ends_the_process_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps([]))
    done = subprocess.run(
        [sys.executable, "-m", "littrainer", "report", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
