"""Several simulated GPUs: one process that sees two, and processes that the command starts on them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.scenarios.other_processes import MAX_WAIT_SECONDS
from tests.simulated_gpu.conftest import simulated_environment
from tests.simulated_gpu.run import run_on_gpu
from tests.simulated_gpu.several_gpus import train_model_on_two_gpus, train_on_the_first_of_two_gpus

SCRIPT = """
import torch
from transformers import Trainer, TrainingArguments

rows = [{"x": torch.randn(6), "labels": 0} for _ in range(8)]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.head(x), labels)}


args = TrainingArguments("out", max_steps=2, report_to="none", save_strategy="no", disable_tqdm=True)
trainer = Trainer(Model(), args, train_dataset=rows)
trainer.train()
with open(f"rank{args.process_index}", "w") as file:
    print(args.world_size, args.device, torch.distributed.get_backend(), file=file)
"""


def test_a_model_over_two_gpus_trains_as_with_transformers(tmp_path: Path) -> None:
    ours, theirs = (
        run_on_gpu(train_model_on_two_gpus, tmp_path, simulated_environment(2), side)
        for side in ("littrainer", "transformers")
    )
    assert ours.pop("devices") == theirs.pop("devices") == ["cuda:0", "cuda:1"]
    assert ours.pop("is parallel") and theirs.pop("is parallel")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_process_with_two_visible_gpus_trains_on_the_first_and_warns_once(tmp_path: Path) -> None:
    results = run_on_gpu(train_on_the_first_of_two_gpus, tmp_path, simulated_environment(2))
    assert (results["device"], results["left on the second"], len(results["warnings"])) == ("cuda:0", 0, 1)


def test_the_command_starts_a_process_for_each_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    finished = subprocess.run(
        [sys.executable, "-m", "littrainer", "run", "--devices", "2", "train.py"],
        cwd=tmp_path,
        env=simulated_environment(2),
        capture_output=True,
        text=True,
        timeout=MAX_WAIT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    for rank in range(2):
        world_size, device, backend = (tmp_path / f"rank{rank}").read_text().split()
        assert (world_size, device) == ("2", f"cuda:{rank}") and "nccl" in backend
