from __future__ import annotations

import sys
from types import ModuleType

import pytest
from accelerate.utils import DeepSpeedPlugin

from littrainer import TrainingArguments
from littrainer.arguments.deepspeed import read_launcher_config
from littrainer.distributed import environment
from littrainer.distributed.environment import (
    REFUSED_VARIABLES,
    check_ranks,
    get_refused_variables,
    get_rendezvous_point,
    local_world_size,
    set_torchrun_variables,
)
from tests.distributed.launchers import PYTORCH_VARIABLES, SLURM_STEP, set_only

# Variables of the world size, the rank and both of them on the node.
MPI_LAUNCHERS = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    "Intel MPI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    "MVAPICH": tuple(f"MV2_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
}


def adopted(variables: dict[str, str]) -> dict[str, str]:
    """torchrun's variables, after those of another launcher have been read."""
    found = dict(variables)
    set_torchrun_variables(found)
    return {name: found[name] for name in PYTORCH_VARIABLES if name in found}


@pytest.mark.parametrize("launcher", MPI_LAUNCHERS)
def test_ranks_of_mpi_become_torchruns(launcher: str) -> None:
    variables = dict(zip(MPI_LAUNCHERS[launcher], ("4", "3", "2", "1"), strict=True))
    assert adopted({**variables, "MASTER_ADDR": "node-a"}) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node-a",
        "MASTER_PORT": "29500",
    }


def test_processes_that_mpi_starts_on_one_node_meet_there_and_one_is_alone() -> None:
    found = adopted({"PMI_SIZE": "2", "PMI_RANK": "1"})
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == ("1", "2", "127.0.0.1")
    assert adopted({"PMI_SIZE": "1", "PMI_RANK": "0"}) == {}


def test_tasks_that_srun_has_started_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, **SLURM_STEP)
    args = TrainingArguments.__new__(TrainingArguments)
    set_torchrun_variables()
    assert (args.world_size, args.process_index, args.local_process_index, args.local_world_size) == (8, 5, 1, 4)
    assert str(get_rendezvous_point()) == "gpu-07:20678"


@pytest.mark.parametrize("difference", [{"SLURM_STEP_NUM_TASKS": None}, {"SLURM_JOB_NAME": "bash"}])
def test_within_an_allocation_a_script_that_srun_has_not_started_several_times_is_alone(
    monkeypatch: pytest.MonkeyPatch, difference: dict[str, str | None]
) -> None:
    set_only(monkeypatch, **{**SLURM_STEP, **difference})
    set_torchrun_variables()
    assert environment.world_size() == 1 and not environment.is_launched()
    set_only(monkeypatch, **SLURM_STEP, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    set_torchrun_variables()
    # torchrun within a task of SLURM decides.
    assert (environment.rank(), environment.world_size(), get_rendezvous_point()) == (1, 2, None)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 says that there are 2 processes, and RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 does not fit WORLD_SIZE=2: ranks go from 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be 1 or more"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK=-1 does not fit"),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 does not fit"),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_variable(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], complaint: str
) -> None:
    set_only(monkeypatch, **variables)
    with pytest.raises(ValueError, match=complaint):
        check_ranks()


@pytest.mark.parametrize("port", ["0", "70000", "many"])
def test_a_port_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    set_only(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with pytest.raises(ValueError, match=f"MASTER_PORT='?{port}"):
        get_rendezvous_point()


DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_CONFIG_DS_FIELDS": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}


def test_deepspeeds_configuration_is_the_one_that_accelerate_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, **DEEPSPEED)
    ours, theirs = read_launcher_config(), DeepSpeedPlugin().deepspeed_config
    assert isinstance(ours, dict)
    assert ours["zero_optimization"]["stage"] == theirs["zero_optimization"]["stage"] == 3
    assert ours["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "offload_param" not in ours["zero_optimization"]
    for name in ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"):
        assert ours[name] == theirs[name]
    key = "stage3_gather_16bit_weights_on_model_save"
    assert ours["zero_optimization"][key] is theirs["zero_optimization"][key] is True


def test_deepspeed_alone_means_stage_2_and_open_values_from_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, ACCELERATE_USE_DEEPSPEED="True")
    config = read_launcher_config()
    assert isinstance(config, dict)
    assert config["zero_optimization"]["stage"] == DeepSpeedPlugin().zero_stage == 2
    assert config["gradient_accumulation_steps"] == config["gradient_clipping"] == config["train_batch_size"] == "auto"
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "zero3.json")
    assert read_launcher_config() == "zero3.json"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "False")
    assert read_launcher_config() is None
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "perhaps")
    with pytest.raises(ValueError, match="ACCELERATE_USE_DEEPSPEED='perhaps' is neither true nor false"):
        read_launcher_config()


@pytest.mark.parametrize("name", REFUSED_VARIABLES)
def test_what_is_not_carried_out_is_refused_by_variable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    set_only(monkeypatch, **{name: "true"})
    assert get_refused_variables() == {name: "true"}
    with pytest.raises(NotImplementedError, match=f"environment variable {name}=true"):
        TrainingArguments("out", use_cpu=True)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("name", [None, "TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_a_single_process_on_a_node_is_believed_of_launchers_only_once_accelerate_is_loaded(
    monkeypatch: pytest.MonkeyPatch, name: str | None, rank: str
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.state", ModuleType("accelerate.state"))
    local_rank = "0" if name else rank
    ranks = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    set_only(monkeypatch, **ranks, **({name: "1"} if name else {}))
    assert local_world_size() == (1 if name else 2)
