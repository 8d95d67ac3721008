"""The state of the accelerator, and what it says about a model split between processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.utils.data import DataLoader

from littrainer import Trainer, TrainerCallback
from littrainer.compat.accelerator import AcceleratorFacade
from littrainer.compat.accelerator.states import AcceleratorStateView, LayoutView, SplitModels, shared_accelerator_state
from tests.compat.processes import facts_of
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

WITHOUT_ACCELERATE = """
import json, sys

sys.modules["accelerate"] = None
import torch
from littrainer import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x, labels=None):
        return {"loss": self.layer(x).sum()}


args = TrainingArguments("out", max_steps=1, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)
trainer = Trainer(model=Model(), args=args, train_dataset=[{"x": torch.ones(2), "labels": 0}])
trainer.train()
state = trainer.accelerator.state
print(json.dumps({
    "state of the arguments": args.distributed_state,
    "kind": [state.distributed_type == "NO", str(state.distributed_type)],
    "facts": [state.num_processes, state.is_main_process, state.mixed_precision, state.deepspeed_plugin],
    "loaded": [name for name in sys.modules if name.startswith("accelerate.")],
}))
"""


def test_littrainer_trains_and_answers_without_accelerate(tmp_path: Path) -> None:
    found = facts_of(WITHOUT_ACCELERATE, tmp_path)
    assert found == {
        "state of the arguments": None,
        "kind": [True, "DistributedType.NO"],
        "facts": [1, True, "no", None],
        "loaded": [],
    }


def test_the_state_is_accelerates_own_where_accelerate_is_loaded(tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    facade = AcceleratorFacade(quiet_arguments(tmp_path, bf16=True))
    assert isinstance(facade.state, AcceleratorState)
    # Libraries make it anew without arguments.
    assert AcceleratorState().mixed_precision == "bf16" and AcceleratorState().deepspeed_plugin is None
    assert facade.distributed_type is DistributedType.NO and PartialState().num_processes == 1


def test_a_state_of_another_precision_is_made_anew(tmp_path: Path) -> None:
    first = AcceleratorFacade(quiet_arguments(tmp_path, bf16=True))
    second = AcceleratorFacade(quiet_arguments(tmp_path))
    assert second.state.mixed_precision == "no"
    assert first.state.mixed_precision == "bf16" and first.mixed_precision == "bf16"
    AcceleratorState._reset_state(reset_partial_state=True)
    assert second.state.device == torch.device("cpu")


def test_the_view_answers_what_libraries_read_of_accelerates_state(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path)
    view, real = AcceleratorStateView(args), shared_accelerator_state(args)
    missing = [
        name for name in (*vars(real), *dir(AcceleratorState)) if not name.startswith("_") and not hasattr(view, name)
    ]
    assert missing == ["destroy_process_group", "get_deepspeed_plugin", "select_deepspeed_plugin"]
    same = "device num_processes process_index local_process_index mixed_precision distributed_type backend is_fsdp2"
    for name in same.split():
        assert getattr(view, name) == getattr(real, name)
    with pytest.raises(AttributeError, match=r"trainer.accelerator.state has no 'select_deepspeed_plugin'"):
        view.select_deepspeed_plugin  # noqa: B018


def test_a_value_of_sync_gradients_that_is_set_holds_for_its_micro_batch(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looking(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(self.accelerator.sync_gradients)
            if len(seen) == 1:
                self.accelerator.gradient_state._set_sync_gradients(True)
                assert self.accelerator.sync_gradients
            return super().compute_loss(model, inputs, *args, **kwargs)

    quiet_trainer(tmp_path, kind=Looking, rows=16, gradient_accumulation_steps=2, max_steps=2).train()
    assert seen == [False, True, False, True]


def test_no_loader_is_read_outside_of_training_and_evaluation(tmp_path: Path) -> None:
    ends: list[Any] = []

    class Note(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            state = trainer.accelerator.gradient_state
            ends.append(
                (state.active_dataloader is kwargs["eval_dataloader"], state.end_of_dataloader, state.remainder)
            )

    trainer = quiet_trainer(tmp_path, given={"callbacks": [Note()]})
    trainer.evaluate()
    assert ends == [(True, False, 1), (True, False, 1), (True, True, 1)]
    state = trainer.accelerator.gradient_state
    assert not state.in_dataloader and not state.end_of_dataloader and state.remainder == -1
    assert state.dataloader_references == [None] and "sync_gradients=True" in repr(state)


def test_a_prepared_loader_that_a_script_goes_through_is_the_one_that_is_read(tmp_path: Path) -> None:
    accelerator = AcceleratorFacade(quiet_arguments(tmp_path))
    state = accelerator.gradient_state
    outer, inner = (accelerator.prepare(DataLoader(range(count), batch_size=2)) for count in (3, 5))
    found: list[Any] = []
    for _ in outer:
        found.append((state.active_dataloader is outer, state.end_of_dataloader, state.remainder))
        for _ in inner:
            found.append((state.active_dataloader is inner, state.end_of_dataloader, state.remainder))
            break
    assert found == [(True, False, 1), (True, False, 1), (True, True, 1), (True, False, 1)]
    assert state.active_dataloader is None


SHARDED: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "activation_checkpointing": True}}


@pytest.fixture(autouse=True)
def state_of_its_own() -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)


def test_one_process_splits_nothing(tmp_path: Path) -> None:
    facade = AcceleratorFacade(quiet_arguments(tmp_path))
    ranks = facade.data_parallel_rank, facade.data_parallel_shard_rank, facade.tensor_parallel_rank
    assert ranks == (0, 0, 0)
    assert facade.parallelism_config is None and facade.torch_device_mesh is None and not facade.is_fsdp2
    assert facade.deepspeed_plugin is None and str(facade.distributed_type) == "DistributedType.NO"


@pytest.mark.usefixtures("in_two")
def test_a_sharded_model_is_told_by_type_and_plugin(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, **SHARDED)
    facade = AcceleratorFacade(args)
    assert str(facade.distributed_type) == "DistributedType.FSDP"
    assert facade.is_fsdp2 and facade.is_composable_parallelism_enabled
    plugin = AcceleratorStateView(args).fsdp_plugin
    assert plugin.fsdp_version == 2 and plugin.activation_checkpointing and plugin.reshard_after_forward is True
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)


PLUGIN_WITHOUT_ACCELERATE = """
import json, os, sys

sys.modules["accelerate"] = None
os.environ.update(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
from littrainer import TrainingArguments
from littrainer.compat.accelerator.states import AcceleratorStateView

args = TrainingArguments("out", use_cpu=True, report_to="none", fsdp=True, fsdp_config={"version": 2})
state = AcceleratorStateView(args)
plugin = state.fsdp_plugin
plugin.set_auto_wrap_policy(None)
try:
    plugin.frobnicate
except AttributeError as error:
    message = str(error)
print(json.dumps([str(state.distributed_type), plugin.fsdp_version, plugin.cpu_offload, state.is_fsdp2, message]))
"""


def test_the_plugin_is_there_without_accelerate_too(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PLUGIN_WITHOUT_ACCELERATE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONGEST_WAIT_SECONDS,
    )
    assert run.returncode == 0, run.stderr
    kind, *facts, message = json.loads(run.stdout)
    assert kind == "DistributedType.FSDP" and facts == [2, False, True]
    assert "no 'frobnicate'; args.fsdp_config" in message


@pytest.mark.usefixtures("in_two")
def test_a_layout_given_as_a_dict_answers_as_accelerates_config_does(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"dp_replicate_size": 1, "tp_size": 2}
    args = quiet_arguments(tmp_path, parallelism_config=sizes)
    view, real = LayoutView(args), ParallelismConfig(**sizes)
    names = [
        f"{dimension}_{kind}" for dimension in ("dp_replicate", "dp_shard", "cp", "tp") for kind in ("size", "enabled")
    ]
    for name in [*names, "total_size", "data_parallel_size", "non_data_parallel_size"]:
        assert getattr(view, name) == getattr(real, name), name
    with pytest.raises(AttributeError, match="no 'frobnicated'"):
        view.frobnicated  # noqa: B018
    facade = AcceleratorFacade(args)
    assert facade.parallelism_config.tp_enabled and facade.tensor_parallel_rank == 1 and facade.data_parallel_rank == 0
    args.parallelism_config = real
    assert SplitModels(args).parallelism_config is real


@pytest.mark.usefixtures("in_two")
def test_the_rank_of_a_replica_is_that_of_the_process_where_each_has_one(tmp_path: Path) -> None:
    facade = AcceleratorFacade(quiet_arguments(tmp_path))
    assert (facade.data_parallel_rank, facade.data_parallel_shard_rank, facade.tensor_parallel_rank) == (1, 0, 0)
    assert facade.parallelism_config is None
