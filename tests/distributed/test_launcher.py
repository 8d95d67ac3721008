from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import LaunchConfig

from littrainer.distributed import launcher
from littrainer.distributed.launcher import (
    Launch,
    LaunchError,
    _describe_failure,
    _get_rendezvous_settings,
    _root_cause,
    check_launch,
)


@pytest.mark.parametrize(
    ("launch", "complaint"),
    [
        (Launch(0), "--devices 0: give the number"),
        (Launch(2, nodes=0), "--nodes 0: give the number of machines"),
        (Launch(2, nodes=2, node_rank=2), "--node-rank 2: with --nodes 2 the machines are numbered from 0 to 1"),
        (Launch(2, main_port=0), "--main-port 0 is no port"),
        (Launch(2, nodes=2, grace_seconds=7), "--nodes 2 needs --main-address"),
        (Launch(2, grace_seconds=-1), "--grace -1: give the seconds"),
        (Launch(2), launcher.GRACE),
    ],
)
def test_invalid_options_are_refused(monkeypatch: pytest.MonkeyPatch, launch: Launch, complaint: str) -> None:
    monkeypatch.setenv(launcher.GRACE, "soon")
    with pytest.raises(LaunchError, match=complaint):
        check_launch(launch)


def test_a_port_in_use_is_refused_on_the_first_node() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            LaunchError, match=f"port {port} is in use on this machine; choose another one by --main-port"
        ):
            check_launch(Launch(2, main_port=port))
        check_launch(Launch(2, nodes=2, node_rank=1, main_address="node-a", main_port=port))


def test_agents_connect_at_the_first_machine_or_at_a_free_port_of_a_single_machine() -> None:
    several = _get_rendezvous_settings(Launch(4, nodes=2, node_rank=1, main_address="node-a", main_port=4711))
    assert several["rdzv_endpoint"] == "node-a:4711" and several["rdzv_configs"] == {"rank": 1}
    without_port = Launch(4, nodes=2, main_address="node-a")
    assert _get_rendezvous_settings(without_port)["rdzv_endpoint"] == "node-a:29500"
    assert _get_rendezvous_settings(Launch(4))["rdzv_endpoint"] == "127.0.0.1:0"
    assert _get_rendezvous_settings(Launch(4, main_port=4711))["rdzv_endpoint"] == "127.0.0.1:4711"


def make_failure(rank: int, exitcode: int, file: Path, **report: Any) -> ProcessFailure:
    if report:
        file.write_text(json.dumps(report))
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=str(file))


def make_report(message: str, timestamp: int) -> dict[str, Any]:
    return {"message": message, "extraInfo": {"timestamp": str(timestamp)}}


def test_the_root_cause_is_named_and_not_its_consequences(tmp_path: Path) -> None:
    failures = {
        0: make_failure(0, 1, tmp_path / "0", message=make_report("PeerLostError: 2 failed", 10), is_consequence=True),
        1: make_failure(1, -15, tmp_path / "1"),
        2: make_failure(2, 1, tmp_path / "2", message=make_report("ValueError:\n sample 17", 11), is_consequence=False),
    }
    rank, cause = _root_cause(failures)
    assert _describe_failure(rank, Launch(3), cause) == (
        "process 2 of 3 (local rank 2, pid 102) ended with status 1: ValueError: sample 17; the others were ended too"
    )


@pytest.mark.parametrize(("grace", "variable", "seconds"), [(None, None, 600), (None, "45", 45), (7, "45", 7)])
def test_processes_have_time_to_save_a_checkpoint_after_a_signal(
    monkeypatch: pytest.MonkeyPatch, grace: int | None, variable: str | None, seconds: int
) -> None:
    for name in (launcher.THREADS, launcher.GRACE):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(launcher.AGENT_LOG_LEVEL, "ERROR")
    monkeypatch.setenv(launcher.GRACE, variable or "")
    timeouts: list[Any] = []

    def start(config: LaunchConfig, program: str) -> Any:
        timeouts.append((config.shutdown_timeout, os.environ[launcher.GRACE]))
        return lambda *arguments: None

    monkeypatch.setattr("torch.distributed.launcher.elastic_launch", start)
    assert launcher.run_processes(Launch(2, grace_seconds=grace), ["python"]) == 0
    assert timeouts == [(seconds, str(seconds))]


def test_a_process_has_some_time_to_end_after_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MIN_ENDING_TIMEOUT_S", 2.0)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        (tmp_path / f"hung-{process.pid}").touch()
        with launcher._end_processes_without_heartbeat(tmp_path, 0.1) as ended:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            assert process.wait(30) and ended[process.pid].startswith("has not responded for 2 s")
