"""State, gradient state and layout of the accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.utils.data import DataLoader

from littrainer import Trainer
from littrainer.arguments.sharding import get_fsdp_plugin_keywords, get_sharding_plan
from littrainer.compat.accelerator import AcceleratorFacade
from tests.compat.processes import facts_of
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

WITHOUT_ACCELERATE = """
import json, sys

sys.modules["accelerate"] = None
import torch
from littrainer import Trainer, TrainingArguments


class Model(torch.nn.Linear):
    def forward(self, x, labels=None):
        return {"loss": super().forward(x).sum()}


args = TrainingArguments("out", max_steps=1, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)
trainer = Trainer(model=Model(2, 2), args=args, train_dataset=[{"x": torch.ones(2), "labels": 0}])
trainer.train()
accelerator = trainer.accelerator
try:
    accelerator.state
except ImportError as error:
    message = str(error)
print(json.dumps({
    "state": [args.distributed_state, message],
    "kind": [accelerator.distributed_type == "NO", str(accelerator.distributed_type)],
    "facts": [accelerator.num_processes, accelerator.is_main_process, accelerator.mixed_precision],
    "loaded": [name for name in sys.modules if name.startswith("accelerate.")],
}))
"""


@pytest.fixture(autouse=True)
def reset_state() -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_littrainer_trains_without_accelerate(tmp_path: Path) -> None:
    assert facts_of(WITHOUT_ACCELERATE, tmp_path) == {
        "state": [None, "trainer.accelerator.state is accelerate's AcceleratorState: pip install accelerate."],
        "kind": [True, "DistributedType.NO"],
        "facts": [1, True, "no"],
        "loaded": [],
    }


def test_the_state_is_that_of_accelerate_if_it_is_loaded(tmp_path: Path) -> None:
    facade = AcceleratorFacade(quiet_arguments(tmp_path, bf16=True))
    assert isinstance(facade.state, AcceleratorState)
    # As in libraries.
    assert AcceleratorState().mixed_precision == "bf16" and AcceleratorState().deepspeed_plugin is None
    assert facade.distributed_type is DistributedType.NO and PartialState().num_processes == 1


def test_a_state_with_a_different_precision_is_replaced(tmp_path: Path) -> None:
    first = AcceleratorFacade(quiet_arguments(tmp_path, bf16=True))
    second = AcceleratorFacade(quiet_arguments(tmp_path))
    assert second.state.mixed_precision == "no"
    assert first.state.mixed_precision == "bf16" and first.mixed_precision == "bf16"
    AcceleratorState._reset_state(reset_partial_state=True)
    assert second.state.device == torch.device("cpu")


def test_sync_gradients_can_be_set_for_a_micro_batch(tmp_path: Path) -> None:
    values: list[bool] = []

    class SyncRecorder(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            values.append(self.accelerator.sync_gradients)
            if len(values) == 1:
                self.accelerator.gradient_state._set_sync_gradients(True)
                assert self.accelerator.sync_gradients
            return super().compute_loss(model, inputs, *args, **kwargs)

    quiet_trainer(tmp_path, kind=SyncRecorder, rows=16, gradient_accumulation_steps=2, max_steps=2).train()
    assert values == [False, True, False, True]


def test_the_innermost_prepared_loader_is_the_active_dataloader(tmp_path: Path) -> None:
    accelerator = AcceleratorFacade(quiet_arguments(tmp_path))
    state = accelerator.gradient_state
    outer, inner = (accelerator.prepare(DataLoader(range(count), batch_size=2)) for count in (3, 5))
    states: list[Any] = []
    for _ in outer:
        states.append((state.active_dataloader is outer, state.end_of_dataloader, state.remainder))
        for _ in inner:
            states.append((state.active_dataloader is inner, state.end_of_dataloader, state.remainder))
            break
    assert states == [(True, False, 1), (True, False, 1), (True, True, 1), (True, False, 1)]
    assert state.active_dataloader is None


def test_fsdp_and_layouts_are_converted_to_accelerates_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    args = quiet_arguments(tmp_path, fsdp=True, fsdp_config={"version": 2, "activation_checkpointing": True})
    facade = AcceleratorFacade(args)
    assert str(facade.distributed_type) == "DistributedType.FSDP"
    assert facade.is_fsdp2
    plan = get_sharding_plan(args)
    assert plan is not None
    plugin = FullyShardedDataParallelPlugin(**get_fsdp_plugin_keywords(plan))
    assert plugin.fsdp_version == 2 and plugin.activation_checkpointing and plugin.reshard_after_forward is True
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)

    sizes: dict[str, Any] = {"dp_replicate_size": 1, "tp_size": 2}
    args = quiet_arguments(tmp_path, parallelism_config=sizes)
    facade, real = AcceleratorFacade(args), ParallelismConfig(**sizes)
    assert facade.parallelism_config == real
    args.parallelism_config = real
    assert facade.parallelism_config is real

    for name in ("cp_size", "sp_size"):
        config = AcceleratorFacade(quiet_arguments(tmp_path, parallelism_config={name: 2})).parallelism_config
        assert (getattr(config, name), config.total_size) == (2, 2)

    # Replicas with tensor parallelism, which the constructor of accelerate's config rejects.
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = AcceleratorFacade(
        quiet_arguments(tmp_path, parallelism_config={"tp_size": 2, "dp_replicate_size": 2})
    ).parallelism_config
    assert (config.dp_replicate_size, config.dp_shard_size, config.tp_size, config.total_size) == (2, 1, 2, 4)
