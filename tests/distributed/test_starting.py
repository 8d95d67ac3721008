"""Scripts in two processes, started in different ways."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.process_launch import find_free_port
from tests.distributed.starting import FACTS, SPAWNING, TRAINING, run, run_by_hand

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are ended by signals of POSIX")


def read_facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"facts{rank}.json").read_text()) for rank in range(2)]


def expected(rank: int, *argv: str) -> dict[str, Any]:
    return {
        "world_size": 2,
        "ranks": [rank, rank, rank],
        "local_world_size": 2,
        "parallel_mode": "distributed",
        "device": ["cpu", 0],
        "writes": [rank == 0, rank == 0],
        "backend": "gloo",
        "sum": 3.0,
        "found_cache": True,
        "can_agree": True,
        "argv": list(argv),
    }


def test_processes_of_littrainer_run_are_connected_by_their_arguments_and_an_error_names_its_process(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(FACTS)
    done = run("-m", "littrainer", "run", "--devices", "2", "script.py", "accelerate", "fail", cwd=tmp_path)
    for rank, facts in enumerate(read_facts(tmp_path)):
        assert facts.pop("state") == [2, rank, "DistributedType.MULTI_CPU"]
        assert facts == expected(rank, "script.py", "accelerate", "fail")
    assert done.returncode == 1
    assert re.search(
        r"littrainer: process 1 of 2 \(local rank 1, pid \d+\) ended with status 1: ValueError: sample 17 is damaged; "
        r"the others were ended too\n$",
        done.stderr,
    )


def test_killing_a_process_ends_the_other_with_an_error_that_names_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINING)
    (first, output), (second, _) = run_by_hand(script, str(tmp_path / "out"))
    assert second == -signal.SIGKILL
    assert first == 1
    assert "PeerLostError: Process 0 of 2 ends training: process 1 has ended without reporting an error" in output


@pytest.mark.parametrize("arguments", [[], ["state first"]], ids=["by ours", "by the script"])
def test_processes_that_a_script_starts_can_train_with_any_origin_of_the_state_of_accelerate(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "script.py").write_text(SPAWNING)
    done = run("script.py", str(find_free_port()), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
