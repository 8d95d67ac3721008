from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import TrainingArguments
from littrainer.arguments.saved_arguments import write_arguments
from littrainer.report.stored_arguments import (
    LARGEST_KEY,
    LONGEST_VALUE,
    MOST_NAMES,
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
# As a pickle: a tuple that holds the one before it twice, 60 times over, which takes a year to hash.
NESTED_TUPLES = b")" + b"q\x01h\x01\x86" * 60
AN_OBJECT = b"c__main__\nArgs\n)\x81"
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


def stored_pickle(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("training_args/data.pkl", content)
    return path


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80\x02cbuiltins\nexec\n", "damaged"),
        (pickle.dumps({"a": 1}), "no training arguments"),
        (b"", "damaged"),
        (b"\x80\x02" + b"(" * 10, "damaged"),
        (b"\x80\x02\x82\x01.", "operation 0x82"),
        # Sets of nested tuples, memory of a size that the file chooses, and a memo with chosen numbers.
        (b"\x80\x04\x8f(" + NESTED_TUPLES + b"\x90.", "operation 0x8f"),
        (b"\x80\x04(" + NESTED_TUPLES + b"\x91.", "operation 0x91"),
        (b"\x80\x05\x96" + b"\0\0\0\0\x08\0\0\0.", "operation 0x96"),
        (b"\x80\x02Np99999999999999999999\n.", "operation 0x70"),
        (b"\x80\x02" + b"ca\nb\n0" * (MOST_NAMES + 1) + b"N.", "names more than"),
        (pickle.dumps("x" * 5_000_000), "too many"),
    ],
)
def test_a_file_with_something_else_in_it_is_refused_with_the_reason(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(Unreadable, match=reason):
        read_arguments(stored_pickle(tmp_path / "args.bin", content))


@pytest.mark.parametrize(
    "key",
    [NESTED_TUPLES, b")" + b"\x85" * 200_000, b"\x8a\x0b" + (5 * LARGEST_KEY).to_bytes(11, "little")],
)
@pytest.mark.parametrize("holder", [b"}", AN_OBJECT])
def test_a_key_that_is_made_to_hang_is_not_hashed(tmp_path: Path, key: bytes, holder: bytes) -> None:
    given = b"".join([b"\x80\x02", AN_OBJECT, b"}X\x01\0\0\0a", holder, key, b"K\x07ssb."])
    text = read_arguments(stored_pickle(tmp_path / "args.bin", given))["a"]
    assert text.startswith("{") and len(text) <= LONGEST_VALUE


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compressed_file_is_not_unfolded(tmp_path: Path, compression: int) -> None:
    path = stored_pickle(tmp_path / "args.bin", b"\x80\x02" + bytes(2_000_000), compression)
    assert path.stat().st_size < 10_000
    with pytest.raises(Unreadable, match="compressed"):
        read_arguments(path)


def test_no_more_of_a_large_file_is_read_than_arguments_take(tmp_path: Path) -> None:
    with open(tmp_path / "args.bin", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(Unreadable, match="too many"):
        read_arguments(tmp_path / "args.bin")


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
