from __future__ import annotations

import errno
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer.checkpoint import summing
from littrainer.checkpoint.manifest import file_record
from littrainer.checkpoint.summing import SummingFile, save_and_sum
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS, wait_until

LARGE = 1 << 18


@pytest.mark.parametrize("without_inner_sums", [False, True])
@pytest.mark.parametrize("numbers", [1, 10, LARGE])
def test_the_sum_of_a_saved_object_is_that_of_its_file(tmp_path: Path, numbers: int, without_inner_sums: bool) -> None:
    value = {"state": {0: torch.randn(numbers), 1: torch.arange(3)}, "lr": 0.5}
    record = save_and_sum(value, tmp_path / "file", without_inner_sums)
    assert record == file_record(tmp_path / "file")
    loaded: Any = torch.load(tmp_path / "file", weights_only=True)
    assert torch.equal(loaded["state"][0], value["state"][0]) and loaded["lr"] == 0.5  # type: ignore[index]


def test_the_bytes_are_those_that_torch_writes_itself(tmp_path: Path) -> None:
    value = {"a": torch.arange(LARGE)}
    save_and_sum(value, tmp_path / "file")
    torch.save(value, tmp_path / "theirs")
    # The folder in the archive has the file's name where torch knows it.
    assert (tmp_path / "file").stat().st_size == pytest.approx((tmp_path / "theirs").stat().st_size, abs=200)


def test_pieces_of_any_kind_are_written(tmp_path: Path) -> None:
    with SummingFile(tmp_path / "file") as file:
        assert file.write(b"ab") == 2
        assert file.write(memoryview(torch.arange(LARGE).numpy().tobytes())) == LARGE * 8
    assert file.record == file_record(tmp_path / "file")


@pytest.mark.parametrize("size", [1, LARGE])
def test_a_full_disk_is_the_systems_own_error(size: int) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        save_and_sum({"a": torch.zeros(size)}, "/dev/full")
    assert caught.value.errno == errno.ENOSPC


def test_a_long_file_goes_to_the_disk_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(summing, "BYTES_BETWEEN_SYNCS", 1000)
    monkeypatch.setattr(os, "fsync", synced.append)
    with SummingFile(tmp_path / "file") as file:
        file.write(b"a" * 999)
        assert synced == []
        file.write(b"a")
    assert len(synced) == 1 and file.record == file_record(tmp_path / "file")


def test_a_disk_that_fails_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(summing, "BYTES_BETWEEN_SYNCS", 10)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"), SummingFile(tmp_path / "file") as file:
        wait_until(lambda: file.write(b"a" * 10) == 0, "a write tells of the failure")


def inner_sums(path: Path) -> set[bool]:
    with zipfile.ZipFile(path) as archive:
        return {entry.CRC != 0 for entry in archive.infolist()}


def test_torchs_own_sums_are_left_out_of_this_file_only(tmp_path: Path) -> None:
    value = {"a": torch.arange(10)}
    save_and_sum(value, tmp_path / "without", without_inner_sums=True)
    save_and_sum(value, tmp_path / "with")
    torch.save(value, tmp_path / "torch's")
    assert inner_sums(tmp_path / "without") == {False}
    assert inner_sums(tmp_path / "with") == inner_sums(tmp_path / "torch's") == {True}


def test_another_thread_leaves_the_setting_of_all_threads_alone(tmp_path: Path) -> None:
    thread = threading.Thread(target=save_and_sum, args=({"a": torch.arange(10)}, tmp_path / "file", True))
    thread.start()
    thread.join(LONGEST_WAIT_SECONDS)
    assert inner_sums(tmp_path / "file") == {True}
