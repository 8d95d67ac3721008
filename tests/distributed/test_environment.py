from __future__ import annotations

import pytest

from littrainer import TrainingArguments
from littrainer.distributed import environment
from littrainer.distributed.environment import adopt_launcher_variables, check_ranks, meeting_point
from tests.distributed.launchers import PYTORCH_VARIABLES, SLURM_STEP, set_only

MPI_LAUNCHERS = {
    "Open MPI": {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "MASTER_ADDR": "node-a",
    },
    "Intel MPI": {
        "PMI_SIZE": "4",
        "PMI_RANK": "3",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": "1",
        "MASTER_ADDR": "node-a",
    },
    "MVAPICH": {
        "MV2_COMM_WORLD_SIZE": "4",
        "MV2_COMM_WORLD_RANK": "3",
        "MV2_COMM_WORLD_LOCAL_SIZE": "2",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MASTER_ADDR": "node-a",
    },
}


def adopted(variables: dict[str, str]) -> dict[str, str]:
    """torchrun's variables, after those of another launcher have been read."""
    found = dict(variables)
    adopt_launcher_variables(found)
    return {name: found[name] for name in PYTORCH_VARIABLES if name in found}


@pytest.mark.parametrize("launcher", MPI_LAUNCHERS)
def test_ranks_of_mpi_become_torchruns(launcher: str) -> None:
    assert adopted(MPI_LAUNCHERS[launcher]) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node-a",
        "MASTER_PORT": "29500",
    }


def test_processes_that_mpi_starts_on_one_node_meet_there() -> None:
    found = adopted({"PMI_SIZE": "2", "PMI_RANK": "1"})
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == ("1", "2", "127.0.0.1")


def test_one_process_of_mpi_is_alone() -> None:
    assert adopted({"PMI_SIZE": "1", "PMI_RANK": "0"}) == {}


def test_tasks_that_srun_has_started_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, **SLURM_STEP)
    args = TrainingArguments.__new__(TrainingArguments)
    adopt_launcher_variables()
    assert (args.world_size, args.process_index, args.local_process_index, args.local_world_size) == (8, 5, 1, 4)
    assert str(meeting_point()) == "gpu-07:20678"


@pytest.mark.parametrize(
    "difference",
    [
        {"SLURM_STEP_NUM_TASKS": None},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_NAME": "bash"},
        {"SLURM_JOB_NAME": "interactive"},
    ],
    ids=["batch script without srun", "one task", "shell", "interactive"],
)
def test_within_an_allocation_a_script_that_srun_has_not_started_several_times_is_alone(
    monkeypatch: pytest.MonkeyPatch, difference: dict[str, str | None]
) -> None:
    set_only(monkeypatch, **{**SLURM_STEP, **difference})
    adopt_launcher_variables()
    assert environment.world_size() == 1 and not environment.is_launched()


def test_torchrun_within_a_task_of_slurm_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, **SLURM_STEP, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    adopt_launcher_variables()
    assert (environment.rank(), environment.world_size(), meeting_point()) == (1, 2, None)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 says that there are 2 processes, and RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 does not fit WORLD_SIZE=2: ranks go from 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be 1 or more"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK=-1 does not fit"),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 does not fit"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 is more than WORLD_SIZE=2"),
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
        meeting_point()
