from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from littrainer.cli import main
from littrainer.explain.command import split

SCRIPT = """
import sys
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
    def forward(self, x, labels):
        return {"loss": ((super().forward(x) - labels) ** 2).mean()}

print("the script speaks")
if __name__ == "__main__":
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    rows = [{"x": torch.ones(2), "labels": 1.0}]
    try:
        trainer = Trainer(model=Model(), args=args, train_dataset=rows)
    except Exception:
        print("caught")
    trainer.train()
    print("trained")
"""


def explain(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "littrainer", "explain", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)


def test_a_script_is_stopped_at_its_trainer_and_explained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = explain("train.py", "--output_dir", "out", "--learning_rate", "3e-4", "--use_cpu", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lightning.Trainer keywords\n")
    assert "learning_rate=0.0003" in done.stdout and "output_dir='out'" in done.stdout
    assert "the script speaks" in done.stderr and "the script speaks" not in done.stdout
    assert "trained" not in done.stderr and "caught" not in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["train.py"]


def test_a_script_without_a_trainer_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("x = 1\n")
    done = explain("--as-code", "other.py", folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "other.py ended without making a Trainer" in done.stderr


def test_arguments_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--output_dir", "out", "--learning-rate", "3e-5", "--use_cpu"]) == 0
    told = capsys.readouterr().out
    assert "learning_rate=3e-05" in told and "accelerator='cpu'" in told


def test_arguments_about_generation_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--predict_with_generate", "true", "--generation_num_beams", "3"]) == 0
    printed = capsys.readouterr().out
    assert "predict_with_generate=True" in printed and "`num_beams` of `generate`" in printed


def test_an_earlier_spelling_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "--evaluation_strategy", "epoch", "--use_cpu"]) == 0
    told = capsys.readouterr().err
    assert (
        told == "littrainer explain: evaluation_strategy='epoch' is an earlier spelling: write eval_strategy='epoch'.\n"
    )


def test_arguments_become_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--as-code", "--data", "mine:rows", "--output_dir", "out", "--optim", "sgd"]) == 0
    printed = capsys.readouterr().out
    assert "from mine import rows as data_factory" in printed and "torch.optim.SGD(groups" in printed
    compile(printed, "printed", "exec")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["stray", "--seed", "1"], "no script 'stray'"),
        (["--per_device_train_batch_size", "0"], "per_device_train_batch_size=0 is out of range"),
        (["--learning_ratt", "1"], "did you mean '--learning_rate'"),
        (["--learning_rate", "fast"], "invalid float value: 'fast'"),
        (["--fp16", "--bf16"], "fp16 and bf16 are both set"),
        (["--model", "a:b", "--seed", "1"], "--as-code"),
        (["nowhere.py"], "no script 'nowhere.py'"),
        (["."], "'.' is a folder; name the script in it"),
        (["--seed", "1", __file__], f"a script stands before its arguments: littrainer explain {__file__} ..."),
        (["-m", "package.train"], "name the script's file in place of -m"),
        (["--as-code=1"], "argument --as-code: ignored explicit argument '1'"),
        (["--as-code", "--data", "rows"], "--data 'rows' is not MODULE:NAME"),
        (["--as-code", "--model", "my-models:make"], "--model 'my-models:make' is not MODULE:NAME"),
        (["--as-code", "--model", "nowhere", "--seed", "1"], "neither MODULE:NAME nor"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    try:
        status: object = main(["explain", *words])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
    assert told.err.startswith("littrainer explain: ") and complaint in told.err


def test_own_options_are_told_from_a_scripts(tmp_path: Path) -> None:
    assert split(["--as-code", "a.py", "--as-code", "--data", "x"]) == (
        ["--as-code"],
        "a.py",
        ["--as-code", "--data", "x"],
    )
    assert split(["--seed", "1", "--as-code"]) == (["--as-code"], None, ["--seed", "1"])


def test_the_wish_for_code_behind_a_script_is_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["explain", str(script), "--as-code"]) == 2
    assert "write it before" in capsys.readouterr().err
