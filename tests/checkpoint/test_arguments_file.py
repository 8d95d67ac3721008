from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from littrainer import Seq2SeqTrainingArguments, TrainingArguments
from littrainer.checkpoint.arguments_file import NAMES_IN_TRANSFORMERS, write_arguments
from tests.scenarios.trainers import quiet_arguments

SECRET = "hf_not_to_be_written"
# Reads a file where littrainer cannot be imported, and makes a Trainer of it.
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


def test_the_file_opens_in_transformers_where_littrainer_is_not_installed(tmp_path: Path) -> None:
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


def test_classes_are_written_under_names_that_transformers_has() -> None:
    for ours, (module, name) in NAMES_IN_TRANSFORMERS.items():
        home, _, attribute = ours.partition(":")
        # Another name of a class is never written.
        if getattr(importlib.import_module(home), attribute).__qualname__ == name:
            assert hasattr(importlib.import_module(module), name)


def test_the_same_arguments_are_pickled_once_and_changed_ones_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, path = quiet_arguments(tmp_path, lr_scheduler_kwargs={"num_cycles": 2}), tmp_path / "training_args.bin"
    write_arguments(args, path)
    written = path.read_bytes()
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *given, **keywords: pytest.fail("written again"))
        write_arguments(args, path)
    assert path.read_bytes() == written
    args.lr_scheduler_kwargs["num_cycles"] = 3
    write_arguments(args, path)
    assert torch.load(path, weights_only=False).lr_scheduler_kwargs == {"num_cycles": 3}


class ScriptArguments(TrainingArguments):
    """As a script derives them."""


def test_arguments_of_a_scripts_own_class_keep_it(tmp_path: Path) -> None:
    write_arguments(ScriptArguments(str(tmp_path), report_to="none"), tmp_path / "training_args.bin")
    assert type(torch.load(tmp_path / "training_args.bin", weights_only=False)) is ScriptArguments


def test_what_lightning_is_given_stays_out_of_the_file(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, lightning={"callbacks": [lambda: None]})
    write_arguments(args, tmp_path / "training_args.bin")
    assert torch.load(tmp_path / "training_args.bin", weights_only=False).lightning is None
    assert args.lightning


def test_access_tokens_keys_and_passwords_are_blanked_and_nothing_else(tmp_path: Path) -> None:
    kept = {"hub_model_id": "someone/model", "learning_rate": 0.5}
    args = quiet_arguments(tmp_path, hub_token=SECRET, **kept)
    secrets = ("hub_token", "other_token", "wandb_api_key", "api_key", "client_secret", "password")
    # As the configurations of libraries on top have them.
    kept.update(eos_token="</s>", pad_token="<pad>", secret_santa="no")
    for name, value in {**dict.fromkeys(secrets, SECRET), **kept}.items():
        setattr(args, name, value)
    args.lr_scheduler_kwargs = {"token": SECRET, "num_cycles": 2, "proxy": f"https://me:{SECRET}@host"}
    write_arguments(args, tmp_path / "training_args.bin")
    assert SECRET.encode() not in (tmp_path / "training_args.bin").read_bytes()
    shared = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert shared.lr_scheduler_kwargs == {"token": None, "num_cycles": 2, "proxy": "https://host"}
    assert {name: getattr(shared, name) for name in secrets} == dict.fromkeys(secrets)
    assert {name: getattr(shared, name) for name in kept} == kept
    assert args.hub_token == args.api_key == args.lr_scheduler_kwargs["token"] == SECRET
