from __future__ import annotations

import os
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
from tests.scenarios.models import VectorClassifier

STATE_PREFIX: dict[str, Any] = {
    "optimizer": {"state": {"a.b": {"step": torch.tensor(3.0), "exp_avg": torch.arange(6.0).view(2, 3)}}}
}
GROUPS_PREFIX = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a.b"]}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "optimizer_0"
    state = {"optimizer": {**STATE_PREFIX["optimizer"], "param_groups": GROUPS_PREFIX}}
    distributed_checkpoint.save(state, storage_writer=distributed_checkpoint.FileSystemWriter(made), no_dist=True)
    return made


def test_one_process_reads_everything_whole(folder: Path) -> None:
    assert has_sharded_state(folder) and not has_sharded_state(folder.parent)
    state = nest_optimizer_state(load_full_state(folder))
    assert state["param_groups"] == GROUPS_PREFIX
    assert torch.equal(state["state"]["a.b"]["exp_avg"], STATE_PREFIX["optimizer"]["state"]["a.b"]["exp_avg"])
    path, read = read_optimizer_state(folder.parent)
    assert path == folder and read["param_groups"] == GROUPS_PREFIX


def test_tensors_are_read_into_those_that_are_given(folder: Path) -> None:
    shapes = {
        name: None if entry is None else tuple(entry.size) for name, entry in read_tensor_metadata(folder).items()
    }
    assert shapes["optimizer.state.a.b.exp_avg"] == (2, 3) and shapes["optimizer.param_groups.0.lr"] is None
    wanted = {"optimizer.state.a.b.exp_avg": torch.zeros(2, 3)}
    given = wanted["optimizer.state.a.b.exp_avg"]
    load_into(folder, wanted)
    assert torch.equal(given, torch.arange(6.0).view(2, 3))
    with pytest.raises(ValueError, match=r"damaged.*other"):
        load_into(folder, {"other": torch.zeros(1)})


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_an_index_that_would_run_code_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match=r"refused: it names .*mkdir"):
        load_full_state(folder)
    assert not Path("harm").exists()


def test_a_value_that_would_run_code_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    harmful = tmp_path / "harmful"
    distributed_checkpoint.save(
        {"lr": Harmful()}, storage_writer=distributed_checkpoint.FileSystemWriter(harmful), no_dist=True
    )
    with pytest.raises(ValueError, match="could run code"):
        load_full_state(harmful)
    assert not Path("harm").exists()


def test_an_index_that_leads_elsewhere_is_refused(folder: Path) -> None:
    index = folder / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(ValueError, match=r"refused: it names .*secret"):
        load_full_state(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damaged_files_are_named_so(name: str, folder: Path) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match="damaged"):
        load_full_state(folder)


def stepped(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """An optimizer that has taken a step; the same for models with the same weights."""
    optimizer = torch.optim.AdamW(parameter_groups(model, get_decayed_parameter_names(model), weight_decay), lr=0.1)
    for place, parameter in enumerate(model.parameters(), start=1):
        parameter.grad = torch.full_like(parameter, float(place))
    optimizer.step()
    return optimizer


def models() -> tuple[nn.Module, nn.Module]:
    """One with whole parameters, and one that has some of each group split, as they say of themselves."""
    torch.manual_seed(0)
    whole = VectorClassifier()
    split = VectorClassifier()
    split.load_state_dict(whole.state_dict())
    for parameter in split.head.parameters():
        parameter.device_mesh = "tp"  # type: ignore[attr-defined]
    return whole, split


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_state_of_a_split_model_has_the_form_of_a_whole_ones_and_goes_back(weight_decay: float) -> None:
    whole, split = models()
    of_whole, of_split = stepped(whole, weight_decay), stepped(split, weight_decay)
    assert [len(group["params"]) for group in of_whole.param_groups] == [2, 4]
    assert [len(group["params"]) for group in of_split.param_groups] == [1, 1, 3, 1]

    named = key_by_name(of_split.state_dict(), get_optimizer_parameter_names(split, of_split))
    written = convert_to_unsharded_param_ids(split, of_split, named)
    expected = of_whole.state_dict()
    assert written["param_groups"] == expected["param_groups"]
    for number, entries in expected["state"].items():
        assert torch.equal(written["state"][number]["exp_avg"], entries["exp_avg"])
    refuse_mismatched_optimizer(Path("of whole"), of_whole, written)

    for stored in (written, named):
        read: Any = convert_to_param_ids(split, of_split, stored)
        before = of_split.state_dict()
        assert read["param_groups"] == before["param_groups"]
        for number, entries in before["state"].items():
            assert torch.equal(read["state"][number]["exp_avg"], entries["exp_avg"])
        # What was loaded can be written again.
        of_split.load_state_dict(read)
        assert convert_to_unsharded_param_ids(split, of_split, named)["param_groups"] == expected["param_groups"]


def test_settings_that_a_group_cannot_have_both_are_left_in_their_groups() -> None:
    whole, split = models()
    of_split = stepped(split, 0.1)
    of_split.param_groups[0]["lr"] = 0.5
    named = key_by_name(of_split.state_dict(), get_optimizer_parameter_names(split, of_split))
    assert len(convert_to_unsharded_param_ids(split, of_split, named)["param_groups"]) == 4
    with pytest.raises(ValueError, match="its groups have"):
        refuse_mismatched_optimizer(
            Path("a"), stepped(whole, 0.1), convert_to_unsharded_param_ids(split, of_split, named)
        )
