from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from littrainer.cli import main
from littrainer.commands import verify
from littrainer.commands.report_folders import load_folders
from littrainer.commands.verify import COMPARED_WITH
from tests.docs.blocks import ROOT
from tests.docs.markdown_links import anchors_of

from .report_folders import write_state
from .verified_scripts import PLANTED, SCRIPT, is_equal, is_named, planted_script
from .verified_scripts import verify as run_verify

# ---- What is said of two sides, each of which ran twice --------------------------------------------------------------


def side(folder: Path, loss: float, weight: float = 1.0, device: str = "cpu", **further: float) -> Any:
    """A run of three steps whose second loss is given, with one weight."""
    entries: list[Any] = [{"step": step, "loss": 2.0, "learning_rate": 0.1} for step in (1, 2, 3)]
    entries[1]["loss"] = loss
    write_state(folder, [*entries, {"step": 3, "eval_loss": 1.0, "eval_runtime": loss, **further}], global_step=3)
    save_file({"layer.weight": torch.tensor([weight, 0.0])}, folder / "model.safetensors")
    record = {"arguments": {}, "environment": {"device": device}, "versions": {"littrainer": "1"}}
    (folder / "littrainer_run.json").write_text(json.dumps(record))
    (run,), _ = load_folders([str(folder)])
    return run


Printed = tuple[int, str]


@pytest.fixture
def said_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command says if transformers' side, ours, and each of them again, end like this."""

    def say(*sides: dict[str, Any]) -> Printed:
        runs = iter([side(tmp_path / str(number), **one) for number, one in enumerate(sides)])
        (tmp_path / "train.py").touch()
        monkeypatch.setattr(verify, "_record_run", lambda *given: next(runs))
        status = main(["verify", str(tmp_path / "train.py")])
        assert next(runs, None) is None, "a side ran once more, or was not asked for"
        return status, capsys.readouterr().out

    return say


def test_equal_sides_run_once_and_all_that_was_compared_is_counted(said_of: Any) -> None:
    status, printed = said_of({"loss": 0.5}, {"loss": 0.5})
    # Three times loss and learning rate, and the evaluation's loss; times are none.
    assert status == 0
    assert printed == "equal, bit for bit: 7 logged values of 3 steps, and 2 weights (cpu)\n"


def test_a_difference_is_named_with_its_step_and_both_numbers(said_of: Any) -> None:
    status, printed = said_of(*[{"loss": 0.5}, {"loss": 0.625}] * 2)
    assert status == 1
    assert printed.startswith("different: first at step 2, after 2 equal values\n")
    assert "  loss: 0.5 with transformers, 0.625 with littrainer (difference 0.125)\n" in printed
    assert "GPU" not in printed and "- a step in the middle" in printed


def test_on_a_gpu_a_difference_as_large_as_between_two_runs_of_one_trainer_is_rounding(said_of: Any) -> None:
    losses = (0.5, 0.5 + 2e-7, 0.5 + 1e-7, 0.5 + 2e-7)
    sides = [{"loss": loss, "weight": 1 + loss - 0.5, "device": "H200"} for loss in losses]
    status, printed = said_of(*sides)
    assert status == 0 and printed.startswith("equal but for rounding: 7 logged values of 3 steps")
    assert "Two runs with the same Trainer differ as much: loss by up to 1e-07, weights by up to 1.19e-07." in printed
    sides[1]["loss"] += 1e-3
    sides[3]["loss"] += 1e-3
    status, printed = said_of(*sides)
    assert status == 1 and "first at step 2, after 2 equal values" in printed and "- kernels of the GPU" in printed


def test_a_script_that_does_not_repeat_its_numbers_is_never_called_equal(said_of: Any) -> None:
    status, printed = said_of({"loss": 0.5}, {"loss": 0.6}, {"loss": 0.7}, {"loss": 0.8})
    assert (
        status == 1
        and "- numbers that the script does not repeat" in printed
        and "same Trainer differ, loss by" in printed
    )
    status, printed = said_of({"loss": 0.5}, {"loss": 0.5, "weight": math.nan}, {"loss": 0.5}, {"loss": 0.5})
    assert status == 1 and "same Trainer differ, weights by up to inf" in printed


@pytest.mark.parametrize(
    ("changes", "difference", "cause"),
    [
        (
            {"weight": 2.0},
            "all 7 logged values are equal, and 1 weights differ, most layer.weight",
            "after",
        ),
        ({"eval_accuracy": 0.5}, "eval_accuracy: not logged with transformers, 0.5 with littrainer", "logs alone"),
    ],
)
def test_the_cause_follows_from_what_differs(
    said_of: Any, changes: dict[str, float], difference: str, cause: str
) -> None:
    status, printed = said_of(*[{"loss": 0.5}, {"loss": 0.5, **changes}] * 2)
    assert status == 1 and difference in printed and cause in printed


def test_known_differences_are_linked_by_topics_that_are_there() -> None:
    known = anchors_of(ROOT / "docs" / "known-differences.md")
    assert set(verify.KNOWN_DIFFERENCES.values()) <= known
    assert f'"transformers=={COMPARED_WITH}"' in (ROOT / "pyproject.toml").read_text()


def test_under_a_launcher_it_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    (tmp_path / "train.py").touch()
    assert main(["verify", str(tmp_path / "train.py")]) == 2
    assert "start it without a launcher" in capsys.readouterr().err


def test_without_what_transformers_trainer_needs_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    (tmp_path / "train.py").touch()
    assert main(["verify", str(tmp_path / "train.py")]) == 2
    assert "needs accelerate: pip install accelerate" in capsys.readouterr().err


# ---- Scripts that run ------------------------------------------------------------------------------------------------


@pytest.fixture
def transformers() -> Iterator[None]:
    """Its own Trainer needs accelerate."""
    pytest.importorskip("accelerate")
    yield


@pytest.mark.usefixtures("transformers")
def test_a_script_is_equal_bit_for_bit_and_leaves_the_users_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        SCRIPT.replace(
            "trainer.train()",
            "try:\n    trainer.train(resume_from_checkpoint=True)\nfinally:\n    open('results', 'w').close()",
        ).replace("#BEFORE", "import littrainer.auto, os\nos.makedirs('user', exist_ok=True); args.output_dir = 'user'")
    )
    done = run_verify(tmp_path, Path("-m"), "module")
    assert is_equal(done), done.stdout + done.stderr
    # Eight steps log a loss, a norm, a rate and an epoch; the evaluation and the whole training follow.
    assert re.match(r"equal, bit for bit: 3\d logged values of 8 steps, and 83 weights \(cpu\)", done.stdout)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["module.py", "user"]
    assert list((tmp_path / "user").iterdir()) == []


@pytest.mark.usefixtures("transformers")
def test_a_script_with_a_planted_difference_is_told_its_step_and_cause(tmp_path: Path) -> None:
    planted = PLANTED["other weights at step 6"]
    done = run_verify(tmp_path, planted_script(tmp_path, planted))
    assert is_named(done, planted), done.stdout + done.stderr


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            SCRIPT.replace("#STEP", "if ON_LIGHTNING: raise ValueError('only here')"),
            r"fails with littrainer's Trainer \(exit status 1\)[^$]*ValueError: only here",
        ),
        ("from littrainer import Trainer", "fails with transformers' own Trainer .*\n.*imports its Trainer from littr"),
        ("print('nothing')", "ended with transformers' own Trainer without a training"),
    ],
    ids=["fails with ours", "has ours alone", "does not train"],
)
def test_a_script_that_cannot_be_verified_says_on_which_side_and_why(code: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(code)
    done = run_verify(tmp_path, tmp_path / "train.py")
    assert done.returncode == 2 and done.stdout == "" and re.search(said, done.stderr), done.stderr
