from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import pytest
import torch
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, PartialState

from littrainer import TrainingArguments
from littrainer.arguments.accelerate_state import DistributedType, distributed_type
from tests.compat.processes import facts_of

LAZINESS = """
import json, sys
from littrainer import TrainingArguments

args = TrainingArguments("out", use_cpu=True)
before = "accelerate" in sys.modules
state = args.distributed_state
print(json.dumps([before, type(state).__module__, state.num_processes, str(state.device)]))
"""


def test_accelerate_is_loaded_only_by_somebody_who_asks_for_its_state(tmp_path: Path) -> None:
    assert facts_of(LAZINESS, tmp_path) == [False, "accelerate.state", 1, "cpu"]


def test_arguments_let_accelerates_loggers_and_collectives_work(caplog: pytest.LogCaptureFixture) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    TrainingArguments("out", use_cpu=True)
    with caplog.at_level(logging.INFO):
        get_logger("library").info("hello")
    assert "hello" in caplog.text and PartialState().device == torch.device("cpu")


def test_a_state_that_says_otherwise_is_made_anew_unless_it_is_the_configured_one() -> None:
    PartialState._shared_state["num_processes"] = 7
    configured = TrainingArguments("out", use_cpu=True, accelerator_config={"use_configured_state": True})
    assert configured.distributed_state.num_processes == 7
    args = TrainingArguments("out", use_cpu=True)
    assert args.distributed_state.num_processes == 1


def test_arguments_of_one_of_several_processes_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    args = TrainingArguments("out", use_cpu=True)
    assert not PartialState._shared_state and distributed_type(args) == "MULTI_CPU"


def test_a_state_of_a_scripts_own_can_be_set_and_stays_behind_when_arguments_travel() -> None:
    args = TrainingArguments("out", use_cpu=True)
    args.distributed_state = own = object()
    assert args.distributed_state is own
    assert pickle.loads(pickle.dumps(args)).distributed_state is not own


def test_what_subclasses_touch_of_the_devices_is_there() -> None:
    args = TrainingArguments("out", use_cpu=True)
    assert args._setup_devices == torch.device("cpu") and args._n_gpu == args.n_gpu == 0
    args._n_gpu = 1
    assert args.n_gpu == 1
    assert TrainingArguments.default_optim == TrainingArguments("out").optim


def test_kinds_of_set_ups_equal_accelerates_and_are_json() -> None:
    from accelerate.state import DistributedType as Theirs

    for member in DistributedType:
        assert member == Theirs[member.name] and Theirs[member.name] == member
        assert hash(member) == hash(Theirs[member.name]) and str(member) == str(Theirs[member.name])
    assert json.dumps(DistributedType.NO) == '"NO"'
