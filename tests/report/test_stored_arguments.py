from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import TrainingArguments
from littrainer.checkpoint.arguments_file import write_arguments
from littrainer.report.stored_arguments import (
    LONGEST_VALUE,
    Unreadable,
    changed_arguments,
    read_arguments,
    usual_arguments,
)
from tests.checkpoint.malicious import Creates

GIVEN: dict[str, Any] = {
    "learning_rate": 0.25,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "use_cpu": True,
    "label_names": ["a", "b"],
}
SHOWN = {
    "learning_rate": "0.25",
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": "{num_cycles: 2}",
    "use_cpu": "True",
    "label_names": "['a', 'b']",
    "output_dir": "out",
}
# What follows from use_cpu, or from the machine.
DERIVED = {"dataloader_pin_memory", "disable_tqdm", "optim", "bf16", "logging_dir"}


def changed(path: Path) -> dict[str, str]:
    found = changed_arguments(read_arguments(path))
    assert found.unknown == {}
    return {name: value for name, value in found.given.items() if name not in DERIVED}


def test_arguments_that_littrainer_stored_are_compared_with_the_defaults(tmp_path: Path) -> None:
    write_arguments(TrainingArguments("out", **GIVEN), tmp_path / "args.bin")
    assert changed(tmp_path / "args.bin") == SHOWN


def test_arguments_that_transformers_stored_are_compared_with_the_defaults(tmp_path: Path) -> None:
    from transformers import TrainingArguments as TheirArguments

    torch.save(TheirArguments("out", **GIVEN), tmp_path / "args.bin")
    assert changed(tmp_path / "args.bin") == SHOWN


def test_what_earlier_releases_store_by_default_is_not_told() -> None:
    of_5_3 = {"trackio_space_id": "trackio", "fsdp": "[]", "fsdp_config": "{min_num_params: 0}"}
    of_4_57 = {"warmup_ratio": "0.0", "save_safetensors": "True", "group_by_length": "False"}
    found = changed_arguments({**usual_arguments(), **of_5_3, **of_4_57, "num_train_epochs": "3"})
    assert (found.given, found.unknown) == ({}, {})


def test_nothing_that_stands_in_the_file_is_run(tmp_path: Path) -> None:
    args = TrainingArguments("out", use_cpu=True)
    args.harmful = Creates(tmp_path / "created")  # type: ignore[attr-defined]
    torch.save(args, tmp_path / "args.bin")
    stored = read_arguments(tmp_path / "args.bin")
    assert not (tmp_path / "created").exists()
    assert stored["output_dir"] == "out"
    torch.load(tmp_path / "args.bin", weights_only=False)
    assert (tmp_path / "created").exists()


def test_secrets_are_hidden_wherever_they_stand(tmp_path: Path) -> None:
    args = TrainingArguments("out", hub_token="hf_secret", use_cpu=True, lr_scheduler_kwargs={"api_key": "sk_secret"})
    torch.save(args, tmp_path / "args.bin")
    stored = read_arguments(tmp_path / "args.bin")
    assert stored["hub_token"] == "(hidden)"
    assert stored["lr_scheduler_kwargs"] == "{api_key: (hidden)}"


def test_what_signs_in_within_urls_is_left_out(tmp_path: Path) -> None:
    address = "https://me:secret@host/x"
    args = TrainingArguments("out", run_name=address, use_cpu=True, lr_scheduler_kwargs={"proxies": [address]})
    torch.save(args, tmp_path / "args.bin")
    stored = read_arguments(tmp_path / "args.bin")
    assert stored["run_name"] == "https://host/x"
    assert stored["lr_scheduler_kwargs"] == "{proxies: ['https://host/x']}"


def test_arguments_of_a_subclass_are_told_without_a_default(tmp_path: Path) -> None:
    args = TrainingArguments("out", use_cpu=True)
    args.temperature = 0.5  # type: ignore[attr-defined]
    torch.save(args, tmp_path / "args.bin")
    assert changed_arguments(read_arguments(tmp_path / "args.bin")).unknown == {"temperature": "0.5"}


def stored_pickle(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("training_args/data.pkl", content)
    return path


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80\x02cbuiltins\nexec\n", "damaged"),
        (pickle.dumps({"a": 1}), "no training arguments"),
        (b"", "damaged"),
        (b"\x80\x02" + b"(" * 10, "damaged"),
        (b"\x80\x02\x82\x01.", "extension"),
        (pickle.dumps("x" * 5_000_000), "too many"),
    ],
)
def test_a_file_with_something_else_in_it_is_refused_with_the_reason(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(Unreadable, match=reason):
        read_arguments(stored_pickle(tmp_path / "args.bin", content))


def test_a_file_that_is_no_archive_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "args.bin").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(Unreadable, match="damaged"):
        read_arguments(tmp_path / "args.bin")
    torch.save({}, tmp_path / "earlier.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(Unreadable, match=r"torch 1\.5"):
        read_arguments(tmp_path / "earlier.bin")
    with zipfile.ZipFile(tmp_path / "other.bin", "w") as archive:
        archive.writestr("readme.txt", "")
    with pytest.raises(Unreadable, match="another kind"):
        read_arguments(tmp_path / "other.bin")


def test_values_that_unfold_without_end_are_cut_short(tmp_path: Path) -> None:
    nested: list[Any] = ["lol"]
    for _ in range(40):
        nested = [nested] * 10
    args = TrainingArguments("out", use_cpu=True)
    args.nested = nested  # type: ignore[attr-defined]
    torch.save(args, tmp_path / "args.bin")
    assert len(read_arguments(tmp_path / "args.bin")["nested"]) <= LONGEST_VALUE
