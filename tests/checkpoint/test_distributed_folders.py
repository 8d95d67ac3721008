from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint

from littrainer.checkpoint.distributed_folders import is_distributed_folder, read_into, read_whole, stored_tensors
from littrainer.checkpoint.fsdp_files import nested_state, read_optimizer_state

STATE: dict[str, Any] = {
    "optimizer": {"state": {"a.b": {"step": torch.tensor(3.0), "exp_avg": torch.arange(6.0).view(2, 3)}}}
}
GROUPS = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a.b"]}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "optimizer_0"
    state = {"optimizer": {**STATE["optimizer"], "param_groups": GROUPS}}
    distributed_checkpoint.save(state, storage_writer=distributed_checkpoint.FileSystemWriter(made), no_dist=True)
    return made


def test_one_process_reads_everything_whole(folder: Path) -> None:
    assert is_distributed_folder(folder) and not is_distributed_folder(folder.parent)
    state = nested_state(read_whole(folder))
    assert state["param_groups"] == GROUPS
    assert torch.equal(state["state"]["a.b"]["exp_avg"], STATE["optimizer"]["state"]["a.b"]["exp_avg"])
    path, read = read_optimizer_state(folder.parent)
    assert path == folder and read["param_groups"] == GROUPS


def test_tensors_are_read_into_those_that_are_given(folder: Path) -> None:
    shapes = {name: None if entry is None else tuple(entry.size) for name, entry in stored_tensors(folder).items()}
    assert shapes["optimizer.state.a.b.exp_avg"] == (2, 3) and shapes["optimizer.param_groups.0.lr"] is None
    wanted = {"optimizer.state.a.b.exp_avg": torch.zeros(2, 3)}
    given = wanted["optimizer.state.a.b.exp_avg"]
    read_into(folder, wanted)
    assert torch.equal(given, torch.arange(6.0).view(2, 3))
    with pytest.raises(ValueError, match=r"damaged.*other"):
        read_into(folder, {"other": torch.zeros(1)})


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_an_index_that_would_run_code_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match=r"refused: it names .*mkdir"):
        read_whole(folder)
    assert not Path("harm").exists()


def test_a_value_that_would_run_code_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    harmful = tmp_path / "harmful"
    distributed_checkpoint.save(
        {"lr": Harmful()}, storage_writer=distributed_checkpoint.FileSystemWriter(harmful), no_dist=True
    )
    with pytest.raises(ValueError, match="could run code"):
        read_whole(harmful)
    assert not Path("harm").exists()


def test_an_index_that_leads_elsewhere_is_refused(folder: Path) -> None:
    index = folder / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(ValueError, match="outside"):
        read_whole(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damaged_files_are_named_so(name: str, folder: Path) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match="damaged"):
        read_whole(folder)
