"""The examples for two processes run in two, and print what they demonstrate."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from littrainer.cli import main
from tests.compat.processes import run_python

pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--images 64 --batch_size 32 --epochs 2"


def test_two_processes_have_the_losses_of_transformers_and_hold_half_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = f"--output_dir {tmp_path / 'copies'} {SMALL}"
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(sys, "argv", ["data_parallel.py", *copies.split()])
    runpy.run_path(str(EXAMPLES / "data_parallel.py"), run_name="__main__")
    assert re.search(r"^loss +1 process$", capsys.readouterr().out, re.MULTILINE)

    runner = Path(__file__).with_name("in_one_process.py")
    lines = (
        f"data_parallel.py {copies}",
        f"fully_sharded.py --output_dir {tmp_path / 'shards'} {SMALL} --width 16 --layers 1",
    )
    done = run_python(
        *("-m", "littrainer", "run", "--devices", "2", str(runner), str(tmp_path), *lines),
        cwd=tmp_path,
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    printed = {}
    for name in ("data_parallel.py", "fully_sharded.py"):
        for rank in range(2):
            folder = tmp_path / str(rank) / Path(name).stem
            facts = json.loads((folder / "facts.json").read_text())
            assert facts["traceback"] is None, facts["traceback"]
            assert facts["trainer_module"].startswith("littrainer")
            printed[name, rank] = (folder / "stdout").read_text()

    table = printed["data_parallel.py", 0]
    assert re.search(r"^loss +1 process +2 processes$", table, re.MULTILINE), table
    losses = re.findall(r"^epoch +\d+ +(\d+\.\d+) +(\d+\.\d+)$", table, re.MULTILINE)
    assert len(losses) == 2
    for first, second in losses:
        assert float(first) == pytest.approx(float(second), abs=2e-3)
    assert re.search(r"^this model +[01]\.\d{3}$", table, re.MULTILINE), table
    assert printed["data_parallel.py", 1] == "process 1 of 2: batches of 16 from 64 images\n"
    assert (tmp_path / "copies" / "model.safetensors").is_file()
    assert main(["report", str(tmp_path / "copies"), str(tmp_path / "shards"), "-o", str(tmp_path / "both.html")]) == 0

    shares = []
    for rank in range(2):
        messages = printed["fully_sharded.py", rank]
        (share,) = re.findall(
            rf"^process {rank} of 2 holds \d+ of \d+ parameters \((\d+\.\d)%\)", messages, re.MULTILINE
        )
        shares.append(float(share))
    assert sum(shares) == pytest.approx(100, abs=0.2) and max(shares) < 65, shares
    totals = re.findall(r"^this model, .+ ([01]\.\d{3})$", printed["fully_sharded.py", 0], re.MULTILINE)
    assert len(totals) == 2 and totals[0] == totals[1]
