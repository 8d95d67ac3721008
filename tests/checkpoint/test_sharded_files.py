from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn

from littrainer.checkpoint.layout import has_sharded_state
from littrainer.checkpoint.reader import read_optimizer_state, refuse_mismatched_optimizer
from littrainer.checkpoint.sharded_files import load_full_state, load_into, nest_optimizer_state, read_tensor_metadata
from littrainer.optim.parameter_groups import get_decayed_parameter_names, parameter_groups
from littrainer.strategies.full_state import (
    convert_to_param_ids,
    convert_to_unsharded_param_ids,
    get_optimizer_parameter_names,
    key_by_name,
)
from tests.checkpoint.malicious import Creates
from tests.scenarios.models import VectorClassifier

OPTIMIZER_STATE: dict[str, Any] = {
    "optimizer": {"state": {"a.b": {"step": torch.tensor(3.0), "exp_avg": torch.arange(6.0).view(2, 3)}}}
}
PARAM_GROUPS = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a.b"]}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "optimizer_0"
    state = {"optimizer": {**OPTIMIZER_STATE["optimizer"], "param_groups": PARAM_GROUPS}}
    distributed_checkpoint.save(state, storage_writer=distributed_checkpoint.FileSystemWriter(folder), no_dist=True)
    return folder


def test_one_process_loads_the_full_state(folder: Path) -> None:
    assert has_sharded_state(folder) and not has_sharded_state(folder.parent)
    state = nest_optimizer_state(load_full_state(folder))
    assert state["param_groups"] == PARAM_GROUPS
    assert torch.equal(state["state"]["a.b"]["exp_avg"], OPTIMIZER_STATE["optimizer"]["state"]["a.b"]["exp_avg"])
    path, read = read_optimizer_state(folder.parent)
    assert path == folder and read["param_groups"] == PARAM_GROUPS


def test_shards_are_loaded_into_existing_tensors(folder: Path) -> None:
    shapes = {
        name: None if entry is None else tuple(entry.size) for name, entry in read_tensor_metadata(folder).items()
    }
    assert shapes["optimizer.state.a.b.exp_avg"] == (2, 3) and shapes["optimizer.param_groups.0.lr"] is None
    tensor = torch.zeros(2, 3)
    load_into(folder, {"optimizer.state.a.b.exp_avg": tensor})
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3))
    with pytest.raises(ValueError, match=r"damaged.*other"):
        load_into(folder, {"other": torch.zeros(1)})


def test_an_index_and_a_value_that_would_run_code_are_refused(folder: Path, tmp_path: Path) -> None:
    harmful, trace = tmp_path / "harmful", tmp_path / "was-run"
    (folder / ".metadata").write_bytes(pickle.dumps(Creates(trace)))
    writer = distributed_checkpoint.FileSystemWriter(harmful)
    distributed_checkpoint.save({"lr": Creates(trace)}, storage_writer=writer, no_dist=True)
    for unsafe in (folder, harmful):
        with pytest.raises(ValueError, match=r"refused: \w+ names .*could run code"):
            load_full_state(unsafe)
    assert not trace.exists()


def test_an_index_with_a_path_outside_of_the_folder_is_refused(folder: Path) -> None:
    index = folder / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(ValueError, match=r"refused: it names .*secret"):
        load_full_state(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damaged_files_are_errors(name: str, folder: Path) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match="damaged"):
        load_full_state(folder)


def make_stepped_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """Return an optimizer after a step, equal for models with equal weights."""
    optimizer = torch.optim.AdamW(parameter_groups(model, get_decayed_parameter_names(model), weight_decay), lr=0.1)
    for number, parameter in enumerate(model.parameters(), start=1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    return optimizer


def models() -> tuple[nn.Module, nn.Module]:
    """Return a full model, and a copy with parameters marked as sharded in each group."""
    torch.manual_seed(0)
    full = VectorClassifier()
    sharded = VectorClassifier()
    sharded.load_state_dict(full.state_dict())
    for parameter in sharded.head.parameters():
        parameter.device_mesh = "tp"  # type: ignore[attr-defined]
    return full, sharded


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_sharded_models_state_converts_to_a_full_models_and_back(weight_decay: float) -> None:
    full, sharded = models()
    full_optimizer, sharded_optimizer = (
        make_stepped_optimizer(full, weight_decay),
        make_stepped_optimizer(sharded, weight_decay),
    )
    assert [len(group["params"]) for group in full_optimizer.param_groups] == [2, 4]
    assert [len(group["params"]) for group in sharded_optimizer.param_groups] == [1, 1, 3, 1]

    named = key_by_name(sharded_optimizer.state_dict(), get_optimizer_parameter_names(sharded, sharded_optimizer))
    written = convert_to_unsharded_param_ids(sharded, sharded_optimizer, named)
    expected = full_optimizer.state_dict()
    assert written["param_groups"] == expected["param_groups"]
    for number, entries in expected["state"].items():
        assert torch.equal(written["state"][number]["exp_avg"], entries["exp_avg"])
    refuse_mismatched_optimizer(Path("of full"), full_optimizer, written)

    for stored in (written, named):
        read: Any = convert_to_param_ids(sharded, sharded_optimizer, stored)
        before = sharded_optimizer.state_dict()
        assert read["param_groups"] == before["param_groups"]
        for number, entries in before["state"].items():
            assert torch.equal(read["state"][number]["exp_avg"], entries["exp_avg"])
        # Loaded states can be saved again.
        sharded_optimizer.load_state_dict(read)
        assert (
            convert_to_unsharded_param_ids(sharded, sharded_optimizer, named)["param_groups"]
            == expected["param_groups"]
        )


def test_groups_with_different_settings_are_not_merged() -> None:
    full, sharded = models()
    sharded_optimizer = make_stepped_optimizer(sharded, 0.1)
    sharded_optimizer.param_groups[0]["lr"] = 0.5
    named = key_by_name(sharded_optimizer.state_dict(), get_optimizer_parameter_names(sharded, sharded_optimizer))
    assert len(convert_to_unsharded_param_ids(sharded, sharded_optimizer, named)["param_groups"]) == 4
    with pytest.raises(ValueError, match="its groups have"):
        refuse_mismatched_optimizer(
            Path("a"),
            make_stepped_optimizer(full, 0.1),
            convert_to_unsharded_param_ids(sharded, sharded_optimizer, named),
        )
