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
from .verified_scripts import SCRIPT, is_equal
from .verified_scripts import verify as run_verify

# ---- Output for two sides, each of which may run twice ---------------------------------------------------------------


def side(folder: Path, loss: float, weight: float = 1.0, device: str = "cpu", **further: float) -> Any:
    """Write a run of three steps, with this second loss and weight."""
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
def verify_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command with these results of transformers, ours, and both again."""

    def run(*sides: dict[str, Any]) -> Printed:
        runs = iter([side(tmp_path / str(number), **facts) for number, facts in enumerate(sides)])
        (tmp_path / "train.py").touch()
        monkeypatch.setattr(verify, "_record_run", lambda *_: next(runs))
        status = main(["verify", str(tmp_path / "train.py")])
        assert next(runs, None) is None, "a side did not run"
        return status, capsys.readouterr().out

    return run


def test_equal_sides_run_once_and_compared_values_are_counted(verify_sides: Any) -> None:
    status, printed = verify_sides({"loss": 0.5}, {"loss": 0.5})
    # Three losses and learning rates, and the evaluation's loss; times do not count.
    assert status == 0
    assert printed == "equal, bit for bit: 7 logged values of 3 steps, and 2 weights (cpu)\n"


def test_a_difference_is_named_with_its_step_and_both_numbers(verify_sides: Any) -> None:
    status, printed = verify_sides(*[{"loss": 0.5}, {"loss": 0.625}] * 2)
    assert status == 1
    assert printed.startswith("different: first at step 2, after 2 equal values\n")
    assert "  loss: 0.5 with transformers, 0.625 with littrainer (difference 0.125)\n" in printed
    assert "GPU" not in printed and "- a step in the middle" in printed


def test_a_difference_as_large_as_between_two_runs_of_a_trainer_is_rounding(verify_sides: Any) -> None:
    losses = (0.5, 0.5 + 2e-7, 0.5 + 1e-7, 0.5 + 2e-7)
    sides = [{"loss": loss, "weight": 1 + loss - 0.5, "device": "H200"} for loss in losses]
    status, printed = verify_sides(*sides)
    assert status == 0 and printed.startswith("equal but for rounding: 7 logged values of 3 steps")
    assert "Two runs with the same Trainer differ as much: loss by up to 1e-07, weights by up to 1.19e-07." in printed
    sides[1]["loss"] += 1e-3
    sides[3]["loss"] += 1e-3
    status, printed = verify_sides(*sides)
    assert status == 1 and "first at step 2, after 2 equal values" in printed and "- kernels of the GPU" in printed


def test_a_script_without_reproducible_numbers_is_never_equal(verify_sides: Any) -> None:
    status, printed = verify_sides({"loss": 0.5}, {"loss": 0.6}, {"loss": 0.7}, {"loss": 0.8})
    assert (
        status == 1
        and "- numbers that the script does not repeat" in printed
        and "same Trainer differ, loss by" in printed
    )
    status, printed = verify_sides({"loss": 0.5}, {"loss": 0.5, "weight": math.nan}, {"loss": 0.5}, {"loss": 0.5})
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
    verify_sides: Any, changes: dict[str, float], difference: str, cause: str
) -> None:
    status, printed = verify_sides(*[{"loss": 0.5}, {"loss": 0.5, **changes}] * 2)
    assert status == 1 and difference in printed and cause in printed


def test_links_to_known_differences_are_valid() -> None:
    anchors = anchors_of(ROOT / "docs" / "known-differences.md")
    assert set(verify.INTENDED_DIFFERENCES.values()) <= anchors
    assert f'"transformers=={COMPARED_WITH}"' in (ROOT / "pyproject.toml").read_text()


def test_verify_refuses_to_run_under_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    (tmp_path / "train.py").touch()
    assert main(["verify", str(tmp_path / "train.py")]) == 2
    assert "start it without a launcher" in capsys.readouterr().err


def test_a_missing_requirement_of_transformers_trainer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    (tmp_path / "train.py").touch()
    assert main(["verify", str(tmp_path / "train.py")]) == 2
    assert "needs accelerate: pip install accelerate" in capsys.readouterr().err


# ---- Scripts that run ------------------------------------------------------------------------------------------------


@pytest.fixture
def transformers() -> Iterator[None]:
    """Skip without accelerate, which transformers' Trainer needs."""
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
    # Loss, norm, rate and epoch of eight steps, then the evaluation and totals.
    assert re.match(r"equal, bit for bit: 3\d logged values of 8 steps, and 83 weights \(cpu\)", done.stdout)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["module.py", "user"]
    assert list((tmp_path / "user").iterdir()) == []


@pytest.mark.usefixtures("transformers")
def test_a_script_with_a_planted_difference_is_told_its_step_and_cause(tmp_path: Path) -> None:
    planted = "if ON_LIGHTNING and state.global_step == 5: model.head.bias.data[0] += 0.5"
    (tmp_path / "train.py").write_text(SCRIPT.replace("#STEP", planted))
    done = run_verify(tmp_path, tmp_path / "train.py")
    pattern = r"first at step 6, after 20 equal values[^$]*loss: [^$]*a step in the middle"
    assert done.returncode == 1 and re.search(pattern, done.stdout), done.stdout + done.stderr


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            SCRIPT.replace("#STEP", "if ON_LIGHTNING: raise ValueError('only here')"),
            r"fails with littrainer's Trainer \(exit status 1\)[^$]*ValueError: only here",
        ),
        ("from littrainer import Trainer", "verify: the script imports its Trainer from littrainer, so"),
        (
            "import lightning\nlightning.Trainer(accelerator='cpu').fit(lightning.LightningModule())",
            "verify: the script trains with lightning.Trainer, so transformers' own Trainer trains nothing",
        ),
        ("print('nothing')", "ended with transformers' own Trainer without a training"),
    ],
    ids=["fails with ours", "has ours alone", "has a lightning.Trainer", "does not train"],
)
def test_a_script_that_cannot_be_verified_says_on_which_side_and_why(code: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(code)
    done = run_verify(tmp_path, tmp_path / "train.py")
    assert done.returncode == 2 and done.stdout == "" and re.search(message, done.stderr), done.stderr
