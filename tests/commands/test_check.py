from __future__ import annotations

from pathlib import Path

import pytest

from tests.check.late_failures.__main__ import SCRIPTS
from tests.compat.processes import run_python

SCRIPT = f"""
import os, sys
import numpy as np
sys.path.insert(0, {str(SCRIPTS)!r})
from small import trainer, texts

with open("work", "a") as file:
    file.write("done once, ")
changes = {{"output_dir": "runs/first", "push_to_hub": True, "hub_model_id": "ann/model", "report_to": "tensorboard"}}
first = trainer(changes=changes)
first.evaluate()
if "rows" in sys.argv:
    expected = np.array([row["labels"] for row in first.eval_dataset] * 5)
    first.eval_dataset = first.eval_dataset * 5
    first.compute_metrics = lambda prediction: {{"accuracy": float((prediction.label_ids == expected).mean())}}
if "finally" in sys.argv:
    try:
        first.train(resume_from_checkpoint=True)
    finally:
        first.save_model()
        open("results", "w").close()
if "check" in sys.argv:
    print(first.check())
if "label" in sys.argv:
    first.train_dataset = texts(2)
    first.train_dataset[1]["labels"] = 7
try:
    first.train()
except Exception:
    print("caught")
print("trained")
first.train()
"""


def test_a_script_runs_once_up_to_its_first_training_without_leftover_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_python("-m", "littrainer", "check", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    title, *lines = done.stdout.splitlines()
    assert title.startswith("littrainer check: the training that train.py, line 28, begins; what the script does after")
    assert "note       Hub: rights to push ann/model were not looked at, since HF_HUB_OFFLINE is set" in lines
    assert lines[-1] == "Nothing was found that would fail."
    assert "trained" not in done.stderr + done.stdout and "caught" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["train.py", "work"]
    assert (tmp_path / "work").read_text() == "done once, "


def test_a_script_that_saves_or_trains_on_its_way_out_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("except Exception", "except") + "first.save_model()")
    for word, begins in (("finally", "line 18, begins, from its first step"), ("check", "line 23, begins;")):
        done = run_python("-m", "littrainer", "check", "train.py", word, cwd=tmp_path)
        assert done.returncode == 0 and begins in done.stdout, done.stdout + done.stderr
        assert done.stdout.count("Nothing was found that would fail.") == 1
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["train.py", "work"]


@pytest.mark.parametrize(
    ("script", "status", "complaint"),
    [
        ("x = 1\n", 2, "littrainer check: other.py ended without a call of train(), so there is nothing to check"),
        ("raise SystemExit(7)\n", 7, ""),
        ("import os\nos._exit(0)\n", 2, "littrainer check: other.py called os._exit(0), so nothing is known"),
        ("raise OSError('no data')\n", 1, "OSError: no data"),
        (
            "import lightning\nlightning.Trainer(accelerator='cpu', logger=False).fit(lightning.LightningModule())\n",
            2,
            "littrainer check: other.py trains with lightning.Trainer, whose fit was not run",
        ),
    ],
)
def test_a_script_that_never_trains_ends_with_one_line_or_by_itself(
    tmp_path: Path, script: str, status: int, complaint: str
) -> None:
    (tmp_path / "other.py").write_text(script)
    done = run_python("-m", "littrainer", "check", "other.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "")
    assert complaint in done.stderr


def test_an_output_dir_that_cannot_be_made_would_fail(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    (tmp_path / "train.py").write_text(SCRIPT.replace('"push_to_hub": True, ', ""))
    done = run_python("-m", "littrainer", "check", "train.py", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "would fail output_dir: NotADirectoryError" in done.stdout and "when: when a Trainer is made" in done.stdout
    assert "1 of " in done.stdout.splitlines()[-1]


ENDS = f"""
import multiprocessing, os, sys
sys.path.insert(0, {str(SCRIPTS)!r})
from small import trainer
from transformers import TrainerCallback

class Ends(TrainerCallback):
    def on_step_end(self, *_, **__):
        os._exit(9) if "os" in sys.argv else sys.exit(0)

def main():
    trainer(callbacks=[Ends()], changes={{"output_dir": "runs/first"}}).train()

if __name__ == "__main__" and "child" in sys.argv:
    child = multiprocessing.get_context("spawn").Process(target=main)
    child.start()
    child.join()
elif __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("word", "error"), [("sys", "SystemExit: 0"), ("os", "SystemExit: os._exit(9)")])
def test_code_that_ends_the_process_within_the_training_is_a_failure(tmp_path: Path, word: str, error: str) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    done = run_python("-m", "littrainer", "check", "train.py", word, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert error in done.stdout and "at optimizer step 1" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_child_process_does_not_train(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    done = run_python("-m", "littrainer", "check", "train.py", "child", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "lets no child process train" in done.stderr and not list(tmp_path.rglob("trainer_state.json"))


@pytest.mark.parametrize(("words", "status"), [(["rows"], 0), (["label"], 1)], ids=["sound", "failing"])
def test_a_training_of_two_processes_is_checked_in_two(tmp_path: Path, words: list[str], status: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = ("-m", "littrainer", "check", "--devices", "2", "train.py", *words)
    done = run_python(*run, cwd=tmp_path, ACCELERATE_USE_CPU="true")
    assert done.returncode == status, done.stdout + done.stderr
    if status == 0:
        assert done.stdout.count("Nothing was found that would fail.") == 1
        assert "36 steps, 3 evaluations and 3 saves" in done.stdout
    else:
        assert "would fail" in done.stdout and "Target 7 is out of bounds" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["train.py", "work"]
