from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Seq2SeqTrainingArguments, TrainingArguments
from littrainer.checkpoint import run_record
from littrainer.checkpoint.run_record import NAMES_IN_TRANSFORMERS, describe_run, write_arguments, write_run_record
from tests.scenarios.data import vector_rows
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

SECRET = "hf_not_to_be_written"
# Loads a file without littrainer, and makes a Trainer.
READER = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "littrainer":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
import torch
import transformers

args = torch.load(sys.argv[1], weights_only=False)
assert type(args) is transformers.Seq2SeqTrainingArguments, type(args)
assert args.learning_rate == 0.125 and args.generation_num_beams == 3
assert args.lr_scheduler_type is transformers.SchedulerType.COSINE
assert args.to_dict()["lr_scheduler_type"] == "cosine"
assert args.accelerator_config.even_batches is False
assert transformers.Trainer(torch.nn.Linear(2, 2), args).args is args
print("read", len(args.to_json_string()) > 100)
"""


def record_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "littrainer_run.json").read_text())


def test_a_saving_run_records_data_model_code_and_strategy_before_its_first_step(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path,
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        trainer_kwargs={"eval_dataset": {"a": vector_rows(3)}},
    )
    trainer.train()
    first = record_in(tmp_path)
    assert first["data"]["train"]["rows"] == 10 and first["data"]["eval a"]["rows"] == 3
    assert first["model"]["class"] == "VectorClassifier"
    assert first["environment"]["strategy"] == "single device" and first["environment"]["threads"] >= 1
    assert set(first["code"]) == {"script", "script hash", "commit", "uncommitted changes"}
    # The record is of the initial weights.
    trainer.save_state()
    assert record_in(tmp_path) == first


def test_a_run_without_saves_writes_no_record_before_save_state(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path / "run", max_steps=1)
    trainer.train()
    assert list((tmp_path / "run").iterdir()) == []
    trainer.save_state()
    assert record_in(tmp_path / "run")["data"]["train"]["rows"] == 10
    assert record_in(tmp_path / "run")["model"] == {}
    assert record_in(tmp_path / "run")["run"]["end"]["reason"] == "completed"


@dataclasses.dataclass
class TrackerSettings:
    api_key: str = "not-to-be-written"
    project: str = "shown"


@dataclasses.dataclass
class ArgumentsWithSettings(TrainingArguments):
    settings: Any = dataclasses.field(default_factory=TrackerSettings)


def test_secrets_in_an_argument_that_is_a_dataclass_are_not_written(tmp_path: Path) -> None:
    write_run_record(ArgumentsWithSettings(str(tmp_path), use_cpu=True), tmp_path)
    shown = record_in(tmp_path)["arguments"]["settings"]
    assert "not-to-be-written" not in shown and "project: 'shown'" in shown


def test_without_git_or_a_script_facts_about_code_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise subprocess.TimeoutExpired("git", 1)

    monkeypatch.setattr(run_record.subprocess, "run", fail)
    monkeypatch.setattr(run_record.sys.modules["__main__"], "__file__", None, raising=False)
    monkeypatch.chdir(tmp_path)
    assert set(describe_run(None, None, None)["code"].values()) == {None}


# ---- training_args.bin -----------------------------------------------------------------------------------------------


def test_training_args_load_in_transformers_without_littrainer(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(
        str(tmp_path / "run"),
        report_to="none",
        learning_rate=0.125,
        lr_scheduler_type="cosine",
        generation_num_beams=3,
        accelerator_config={"even_batches": False},
        async_save=True,
        jit_checkpoint_signals=["SIGTERM"],
    )
    write_arguments(args, tmp_path / "training_args.bin")
    command = [sys.executable, "-c", READER, "training_args.bin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "read True"), done.stderr


def test_classes_are_pickled_with_names_of_transformers() -> None:
    for ours, (module, name) in NAMES_IN_TRANSFORMERS.items():
        home, _, attribute = ours.partition(":")
        # An alias of a class is never written.
        if getattr(importlib.import_module(home), attribute).__qualname__ == name:
            assert hasattr(importlib.import_module(module), name)


class ScriptArguments(TrainingArguments):
    """A script's subclass."""


def test_arguments_of_a_scripts_class_keep_their_class(tmp_path: Path) -> None:
    write_arguments(ScriptArguments(str(tmp_path), report_to="none"), tmp_path / "training_args.bin")
    assert type(torch.load(tmp_path / "training_args.bin", weights_only=False)) is ScriptArguments


def test_lightning_objects_are_not_written(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, lightning={"callbacks": [lambda: None]})
    write_arguments(args, tmp_path / "training_args.bin")
    assert torch.load(tmp_path / "training_args.bin", weights_only=False).lightning is None
    assert args.lightning


def test_only_tokens_keys_and_passwords_are_blanked(tmp_path: Path) -> None:
    unchanged = {"hub_model_id": "someone/model", "learning_rate": 0.5}
    args = quiet_arguments(tmp_path, hub_token=SECRET, **unchanged)
    secrets = ("hub_token", "other_token", "wandb_api_key", "api_key", "client_secret", "password")
    # As in configurations of other libraries.
    unchanged.update(eos_token="</s>", pad_token="<pad>", secret_santa="no")
    for name, value in {**dict.fromkeys(secrets, SECRET), **unchanged}.items():
        setattr(args, name, value)
    args.lr_scheduler_kwargs = {"token": SECRET, "num_cycles": 2, "proxy": f"https://me:{SECRET}@host"}
    write_arguments(args, tmp_path / "training_args.bin")
    assert SECRET.encode() not in (tmp_path / "training_args.bin").read_bytes()
    shared = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert shared.lr_scheduler_kwargs == {"token": None, "num_cycles": 2, "proxy": "https://host"}
    assert {name: getattr(shared, name) for name in secrets} == dict.fromkeys(secrets)
    assert {name: getattr(shared, name) for name in unchanged} == unchanged
    assert args.hub_token == args.api_key == args.lr_scheduler_kwargs["token"] == SECRET
