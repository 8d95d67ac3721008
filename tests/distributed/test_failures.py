from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from littrainer import TrainingArguments
from littrainer.distributed import collectives, failures
from littrainer.distributed.environment import REPORTS
from littrainer.distributed.failures import (
    HUNG_FILE,
    HangError,
    PeerFailedError,
    PeerLostError,
    describe_connection_loss,
    name_failed_process,
    publish_failure,
    report_errors,
)

CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:52622"
ActAs = Callable[[int], None]


@pytest.fixture
def act_as(monkeypatch: pytest.MonkeyPatch) -> Iterator[ActAs]:
    """Return a function that lets this process act as a rank of two with a shared store."""
    store = dist.HashStore()
    monkeypatch.setattr(failures, "PUBLICATION_TIMEOUT_S", 0.1)
    stores = {rank: failures._FailureStore(store, rank, 2) for rank in range(2)}

    def act_as(rank: int) -> None:
        report_errors(store, rank, 2)
        failures._store = stores[rank]

    with replace_excepthook():
        yield act_as
    failures._store = None


@contextmanager
def replace_excepthook() -> Iterator[None]:
    """Replace the excepthook temporarily."""
    before = sys.excepthook
    sys.excepthook = lambda *error: sys.stderr.write(f"{error[1]!r}")
    yield
    sys.excepthook = before


def test_a_lost_connection_names_the_process_that_failed_and_its_error(act_as: ActAs) -> None:
    act_as(1)
    with pytest.raises(ValueError, match="sample 17"), name_failed_process("training"):
        raise ValueError("sample 17 is damaged")
    act_as(0)
    complaint = "Process 0 of 2 ends training: process 1 failed with ValueError: sample 17 is damaged"
    with pytest.raises(PeerLostError, match=complaint) as caught, name_failed_process("training"):
        raise RuntimeError(CLOSED)
    assert str(caught.value.__cause__) == CLOSED


def test_an_error_of_an_exchange_names_the_failed_process(act_as: ActAs, monkeypatch: pytest.MonkeyPatch) -> None:
    act_as(1)
    publish_failure(ValueError("sample 17 is damaged"))
    act_as(0)
    monkeypatch.setattr(collectives, "is_distributed", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def connect() -> None:
        raise dist.DistNetworkError("Broken pipe")

    # The first exchange connects the processes.
    monkeypatch.setattr(collectives, "_connect", connect)
    message = (
        "Process 0 of 2 can no longer agree with the others: process 1 failed with ValueError: sample 17 is damaged"
    )
    with pytest.raises(PeerLostError, match=message):
        collectives.any_rank(True)


def test_invalid_utf_8_in_an_error_is_escaped(act_as: ActAs) -> None:
    act_as(1)
    publish_failure(ValueError("caf\udce9.wav is no sound"))
    act_as(0)
    with pytest.raises(PeerLostError, match=r"failed with ValueError: caf\\udce9\.wav"), name_failed_process("a"):
        raise RuntimeError(CLOSED)


def test_an_error_of_the_script_is_not_converted(act_as: ActAs) -> None:
    act_as(0)
    with pytest.raises(RuntimeError, match=r"^shapes do not fit$"), name_failed_process("training"):
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize("consequence", [PeerLostError("another"), PeerFailedError("another")])
def test_a_consequence_of_another_failure_is_not_published(act_as: ActAs, consequence: Exception) -> None:
    act_as(0)
    publish_failure(consequence)
    act_as(1)
    publish_failure(KeyError("the cause"))
    act_as(0)
    with pytest.raises(PeerLostError, match="process 1 failed with KeyError"), name_failed_process("training"):
        raise RuntimeError(CLOSED)


def test_an_error_that_a_script_has_caught_is_not_named_later(act_as: ActAs) -> None:
    act_as(1)
    with pytest.raises(ValueError), name_failed_process("training"):
        raise ValueError("out of memory")
    with name_failed_process("training"):
        pass
    act_as(0)
    with pytest.raises(PeerLostError) as caught, name_failed_process("training"):
        raise RuntimeError(CLOSED)
    assert "out of memory" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("Timed out waiting 20000ms for recv operation to complete", "raise ddp_timeout"),
        ("Unable to find address for: node-3", "GLOO_SOCKET_IFNAME"),
        ("NCCL error in: x.cpp, unhandled system error", "NCCL_DEBUG=INFO"),
        ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device", "as many processes as there are GPUs"),
        ("NCCL collective timeout", "raise ddp_timeout"),
        ("Connection closed by peer", "one of them has ended"),
    ],
)
def test_errors_of_libraries_have_advice(message: str, advice: str) -> None:
    assert advice in describe_connection_loss(RuntimeError(message))


def test_errors_are_written_for_the_agent_of_torchrun(
    act_as: ActAs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    act_as(1)
    sys.excepthook(ValueError, ValueError("sample 17"), None)
    written: dict[str, Any] = json.loads((tmp_path / "error.json").read_text())
    assert written["message"]["message"] == "ValueError: sample 17" and written["is_consequence"] is False
    assert int(written["message"]["extraInfo"]["timestamp"]) > 0
    assert "sample 17" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "lost.json"))
    sys.excepthook(RuntimeError, RuntimeError("Connection closed by peer"), None)
    assert json.loads((tmp_path / "lost.json").read_text())["is_consequence"] is True


def test_errors_of_the_arguments_are_written_for_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv(failures.ERROR_FILE, str(file))
    with replace_excepthook():
        with pytest.raises(ValueError, match="ddp_timeout=0") as refused:
            TrainingArguments("out", use_cpu=True, ddp_timeout=0)
        sys.excepthook(ValueError, refused.value, None)
    report = json.loads(file.read_text())
    assert report["message"]["message"].startswith("ValueError: ddp_timeout=0") and report["is_consequence"] is False


def test_a_hang_marks_its_process(act_as: ActAs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(REPORTS, f"{os.getppid()}:{tmp_path}")
    act_as(0)
    sys.excepthook(HangError, HangError("Training has not moved"), None)
    assert [path.name for path in tmp_path.iterdir()] == [f"{HUNG_FILE}-{os.getpid()}"]


def test_a_worker_without_a_process_id_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures.os, "kill", lambda number, _: pytest.fail(f"{number} is a whole group"))
    worker: Any = SimpleNamespace(pid=None)
    assert "in test_a_worker" in failures.dump_all_stacks("heading", [worker], str)
