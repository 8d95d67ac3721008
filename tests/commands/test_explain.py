from __future__ import annotations

import ast
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor

from littrainer import EarlyStoppingCallback, Trainer, TrainingArguments
from littrainer.arguments.destinations import READERS
from littrainer.cli import main
from littrainer.commands.explain import (
    _create_tiny_trainer,
    explain_trainer,
    get_changed_arguments,
    render_program,
)
from littrainer.commands.output_dirs import remove_output_dirs
from littrainer.lightning_adapter.lightning_trainer import lightning_keywords
from tests.compat.processes import run_python
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

SCRIPT = """
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


# ---- The command -----------------------------------------------------------------------------------------------------


def test_a_script_is_stopped_at_its_trainer_and_its_arguments_are_shown_first(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ("train.py", "--seed", "42", "--learning_rate", "3e-4", "--use_cpu")
    done = run_python("-m", "littrainer", "explain", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    title, *lines = done.stdout.splitlines()
    assert title == "your arguments, and those that differ from their defaults"
    # seed has its default.
    assert sorted(line.split()[0] for line in lines[:3]) == ["learning_rate=0.0003", "seed=42", "use_cpu=True"]
    assert lines[3].startswith("  output_dir='trainer_output' ")
    assert "3 optimizer steps of 8 samples, 3 epochs of 1 samples" in line_of(done.stdout, "length")
    assert "the script speaks" in done.stderr and "the script speaks" not in done.stdout
    assert "trained" not in done.stderr and "caught" not in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["train.py"]


@pytest.mark.parametrize(
    ("script", "status", "complaint"),
    [("x = 1\n", 2, "other.py ended without making a Trainer"), ("raise SystemExit(7)\n", 7, "")],
)
def test_a_script_without_a_trainer_ends_with_one_line_or_by_itself(
    tmp_path: Path, script: str, status: int, complaint: str
) -> None:
    (tmp_path / "other.py").write_text(script)
    done = run_python("-m", "littrainer", "explain", "--as-code", "other.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "")
    assert complaint in done.stderr


LIGHTNING_SCRIPT = """
import sys
import lightning
import torch
from torch.utils.data import DataLoader
from littrainer import TransformersModule

module = TransformersModule(torch.nn.Linear(1, 1), {"learning_rate": 3e-4, "num_train_epochs": 7})
trainer = lightning.Trainer(max_epochs=2, accumulate_grad_batches=4, accelerator="cpu", precision="bf16-mixed")
try:
    trainer.fit(module, DataLoader([1.0]))
except Exception:
    print("caught")
finally:
    print("trained")
"""


def test_a_lightning_program_is_stopped_at_its_fit_and_its_settings_are_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING_SCRIPT)
    done = run_python("-m", "littrainer", "explain", "train.py", cwd=tmp_path)
    assert done.returncode == 0 and "caught" not in done.stderr, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "this script trains with lightning.Trainer, whose fit was not run"
    assert {
        "module TransformersModule",
        "length max_epochs=2, max_steps=-1, check_val_every_n_epoch=1, val_check_interval=1.0",
        "strategy SingleDeviceStrategy on cpu",
        "precision plugin MixedPrecision (bf16-mixed)",
        "optimization the optimizer steps after 4 micro-batches",
        "num_train_epochs=7 lightning.Trainer decides: max_epochs",
    } <= {*lines}
    assert any(line.startswith("learning_rate=0.0003 ") for line in lines)
    as_code = run_python("-m", "littrainer", "explain", "--as-code", "train.py", cwd=tmp_path)
    assert (as_code.returncode, as_code.stdout) == (2, "") and "it is a Lightning program" in as_code.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["train.py"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--learning-rate", "3e-5", "--predict_with_generate", "true"], "learning_rate=3e-05"),
        (["--as-code", "--optim", "sgd"], "\"optim\": 'sgd'"),
    ],
)
def test_arguments_are_explained(capsys: pytest.CaptureFixture[str], words: list[str], shown: str) -> None:
    assert main(["explain", *words]) == 0
    assert shown in capsys.readouterr().out


def test_an_earlier_spelling_is_reported_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--evaluation_strategy", "epoch", "--use_cpu"]) == 0
    warned = "littrainer explain: evaluation_strategy='epoch' is an earlier spelling: write eval_strategy='epoch'.\n"
    assert capsys.readouterr().err == warned


# ---- In words --------------------------------------------------------------------------------------------------------


def report_on(args: TrainingArguments) -> str:
    with remove_output_dirs():
        return explain_trainer(_create_tiny_trainer(args), args)


def line_of(report: str, start: str) -> str:
    (line,) = [line.strip() for line in report.splitlines() if line.strip().startswith(start)]
    return line


def test_keywords_have_their_reasons_and_changed_arguments_the_place_they_went_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes: dict[str, Any] = {"gradient_accumulation_steps": 3, "learning_rate": 3e-5, "use_cpu": True}
    args = TrainingArguments("runs/one", lightning={"detect_anomaly": True}, hub_token="secret", **changes)
    report = report_on(args)
    arguments, _, keywords = report.partition("keywords of lightning.Trainer")
    for name, value in lightning_keywords(args).items():
        assert len(line_of(keywords, f"{name}={value!r} ").split()) > 2
    assert line_of(keywords, "accumulate_grad_batches=3").endswith("from gradient_accumulation_steps")
    assert line_of(keywords, "detect_anomaly=True").endswith("given as `lightning`")
    for name, value in changes.items():
        assert f"  {READERS[name]}: " in line_of(arguments, f"{name}={value!r} ")
    assert "weight_decay" not in arguments and "secret" not in report and line_of(arguments, "output_dir='runs/one'")
    assert list(tmp_path.iterdir()) == []
    usual = TrainingArguments(disable_tqdm=TrainingArguments().disable_tqdm)
    assert get_changed_arguments(usual) == {"output_dir": "trainer_output"}


def test_the_parts_of_the_training_are_named() -> None:
    args = TrainingArguments(use_cpu=True, bf16=True, gradient_accumulation_steps=4, disable_tqdm=True)
    report = [" ".join(line.split()) for line in report_on(args).splitlines()]
    assert report[report.index("parts of the training") + 1 :] == [
        "strategy SingleDeviceStrategy on cpu",
        "precision plugin MixedPrecision (bf16-mixed)",
        "optimization automatic; the optimizer steps after 4 micro-batches",
        "optimizer adamw_torch_fused, learning_rate=5e-05",
        "schedule linear",
        "Trainer callbacks DefaultFlowCallback, PrinterCallback",
        "Lightning callbacks none",
        "Lightning loggers none",
        "trackers none (report_to)",
    ]


def test_callbacks_and_lightning_keywords_of_a_script_are_shown(tmp_path: Path) -> None:
    kwargs = {
        "callbacks": [EarlyStoppingCallback(), LearningRateMonitor()],
        "lightning": {"profiler": "simple", "logger": True, "default_root_dir": str(tmp_path)},
    }
    trainer = quiet_trainer(tmp_path, kind=StepwiseTrainer, trainer_kwargs=kwargs)
    report = explain_trainer(trainer, trainer.args)
    assert "EarlyStoppingCallback" in line_of(report, "Trainer callbacks")
    assert line_of(report, "Lightning callbacks").endswith("LearningRateMonitor")
    assert "manual" in line_of(report, "optimization")
    assert line_of(report, "profiler='simple'").endswith("given as `lightning`")


# ---- As a program ----------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 0.02,
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "num_train_epochs": 2,
}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(folder / "out"), **{**SMALL, **changes})


def run(text: str, folder: Path) -> dict[str, Any]:
    """Run a program, and return its variables."""
    path = folder / "program.py"
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_train_epochs": 0.7, "warmup_steps": 2, "label_smoothing_factor": 0.3, "dataloader_drop_last": True},
        {
            "gradient_accumulation_steps": 4,
            "max_grad_norm": 0.1,
            "weight_decay": 0.3,
            "optim": "adafactor",
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_on_start": True,
            "seed": 7,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        },
    ],
    ids=["epochs", "accumulation"],
)
def test_the_printed_program_trains_to_the_same_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    args = arguments(tmp_path, **{"num_train_epochs": 1, **changes})
    names = run(render_program(args), tmp_path)
    rows, model = names["make_rows"](), names["make_model"]()
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert names["trainer"].global_step == trainer.state.global_step
    for name, weight in names["trainer"].lightning_module.model.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(weight, names["make_model"]().state_dict()[name])


def test_a_program_with_placeholders_runs_unchanged(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "bf16": True,
        "save_strategy": "steps",
        "save_steps": 0.5,
        "save_total_limit": 1,
        "logging_strategy": "steps",
        "lightning": {"profiler": "simple"},
        "neftune_noise_alpha": 5,
    }
    names = run(render_program(arguments(tmp_path, per_device_train_batch_size=8, **changes)), tmp_path)
    assert names["trainer"].global_step == 16
    assert list((tmp_path / "out").rglob("*.ckpt")) != []


def get_heading(text: str) -> str:
    return ast.get_docstring(ast.parse(text)) or ""


def test_arguments_missing_in_a_program_are_listed_at_its_top(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"run_name": "one", "tf32": False, "lightning": {"plugins": [print]}}
    head = get_heading(render_program(arguments(tmp_path, **changes), script="folder/train.py"))
    assert all(f"- {name}: " in head for name in changes) and "- learning_rate" not in head
    assert "Instead: torch.set_float32_matmul_precision." in head
    assert "the arguments of train.py" in head and "return the model in make_model" in head
