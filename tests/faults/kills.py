"""A run that saves every two steps, killed (SIGKILL) at random times and resumed after each kill.

    python -m tests.faults.kills                         50 kills
    python -m tests.faults.kills --trainer transformers  transformers' own Trainer through the same
    python -m tests.faults.kills --trainer lightning     a plain Lightning program through the same

After each kill a copy of the run's folder is resumed with `resume_from_checkpoint=True` and trained to its end: the
final weights must be those of an undisturbed run, bit for bit, and the newest checkpoint that `on_save` reported must
exist. Then the run continues to the next kill; a finished run is replaced by a new run. Runs are forked, so that no
kill hits an import.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.faults.damage import SIDES, is_equal

WIDTH, STEPS, SAVE_STEPS, SAVE_TOTAL_LIMIT = 400, 40, 2, 3
FINISHED = "final.pt"
PLAIN = "lightning"


class Dropping(nn.Module):
    """A model whose checkpoints take as long to write as several steps, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.mse_loss(logits[:, 0], labels), "logits": logits}


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, generator=generator), "labels": torch.tensor(float(n))} for n in range(24)]


def train(library: str, folder: Path, report: Callable[[int], object] = lambda step: None) -> None:
    """Train to the end, from the newest checkpoint if any, and write the final weights."""
    if library == PLAIN:
        _train_plainly(folder, report)
        return
    names = importlib.import_module(library)

    class Report(names.TrainerCallback):  # type: ignore[name-defined]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report(state.global_step)

    torch.manual_seed(0)
    arguments = names.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        save_total_limit=SAVE_TOTAL_LIMIT,
        per_device_train_batch_size=4,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        # Kills may hit the thinning of older checkpoints.
        **({"keep_optimizer_states": SAVE_TOTAL_LIMIT - 1} if library == "littrainer" else {}),
    )
    trainer = names.Trainer(model=Dropping(), args=arguments, train_dataset=samples(), callbacks=[Report()])
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    torch.save(trainer.model.state_dict(), folder / FINISHED)


def _train_plainly(folder: Path, report: Callable[[int], object]) -> None:
    """Train by `lightning.Trainer` with a ModelCheckpoint and ckpt_path."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Dropping()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=5e-5)

    class Checkpoints(ModelCheckpoint):
        FILE_EXTENSION = ""

        def _save_checkpoint(self, trainer: lightning.Trainer, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            report(trainer.global_step)

    torch.manual_seed(0)
    names: dict[str, Any] = {"filename": "checkpoint-{step}", "auto_insert_metric_name": False, "dirpath": folder}
    saving = Checkpoints(
        every_n_train_steps=SAVE_STEPS, monitor="step", mode="max", save_top_k=SAVE_TOTAL_LIMIT, **names
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=STEPS, callbacks=[saving], gradient_clip_val=1.0, **quiet)
    newest = max(steps_in(folder), default=None)
    loader = DataLoader(samples(), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    module = Module()
    trainer.fit(module, loader, ckpt_path=None if newest is None else folder / f"checkpoint-{newest}")
    torch.save(module.model.state_dict(), folder / FINISHED)


@dataclass
class Child:
    """A run in a child process.

    Parameters:
        pid: the process.
        reports: the pipe with a byte for each saved step.
    """

    pid: int
    reports: int

    @classmethod
    def start(cls, library: str, folder: Path) -> Child:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            return cls(pid, reading)
        status = 1
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            train(library, folder, lambda step: os.write(writing, bytes([step])))
            status = 0
        finally:
            os._exit(status)

    def end(self) -> tuple[bool, int]:
        """Wait, and return whether the run succeeded, and the last saved step or 0."""
        _, status = os.waitpid(self.pid, 0)
        saved = b""
        while piece := os.read(self.reports, 4096):
            saved += piece
        os.close(self.reports)
        return status == 0, saved[-1] if saved else 0


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def run_to_the_end(library: str, folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the final weights; None after an exception."""
    ended_well, _ = Child.start(library, folder).end()
    return torch.load(folder / FINISHED, weights_only=True) if ended_well else None


def outcome_of_a_kill(
    library: str, root: Path, expected: dict[str, torch.Tensor], saved: int, existing: list[int]
) -> str:
    """Return the outcome of a resume after a kill."""
    if saved and saved not in existing:
        return "a checkpoint lost"
    copy = root / "copy"
    shutil.copytree(root / "run", copy)
    try:
        final = run_to_the_end(library, copy)
        if final is None:
            return "the resume failed"
        if not is_equal(final, expected):
            return "different"
        # Surplus files could confuse a later run or an upload.
        expected_names = {FINISHED, "littrainer_run.json", *(f"checkpoint-{step}" for step in steps_in(copy))}
        surplus = {path.name for path in copy.iterdir()} - expected_names
        return f"exact, but {sorted(surplus)} remain" if surplus else "exact"
    finally:
        shutil.rmtree(copy)


def kill_often(library: str, root: Path, kills: int, seed: int) -> collections.Counter[str]:
    """Kill a run `kills` times; count the outcomes, and the kills during a write."""
    generator = random.Random(seed)
    start = time.monotonic()
    expected = run_to_the_end(library, root / "undisturbed")
    if expected is None:
        raise RuntimeError("The undisturbed run ends with an exception.")
    duration = time.monotonic() - start
    counts: collections.Counter[str] = collections.Counter()
    saved = killed = 0
    while killed < kills:
        child = Child.start(library, root / "run")
        # A run is killed several times.
        time.sleep(generator.uniform(0, duration / 2))
        os.kill(child.pid, signal.SIGKILL)
        ended_well, newest = child.end()
        saved = max(saved, newest)
        if ended_well:
            shutil.rmtree(root / "run")
            saved = 0
            continue
        killed += 1
        if not (root / "run").exists():
            (root / "run").mkdir()
        if any((root / "run" / ".unfinished").glob("*")):
            counts["amid a write"] += 1
        outcome = outcome_of_a_kill(library, root, expected, saved, steps_in(root / "run"))
        counts[outcome] += 1
        if not outcome.startswith("exact"):
            # Start over.
            shutil.rmtree(root / "run")
            saved = 0
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=(*SIDES, PLAIN), default=SIDES[0], help="which library trains")
    parser.add_argument("--kills", type=int, default=50, help="how often a run is killed (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="which moments (default: 0)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if options.trainer == PLAIN:
        importlib.import_module("lightning.pytorch.callbacks")
    else:
        names = importlib.import_module(options.trainer)
        for name in ("Trainer", "TrainingArguments", "TrainerCallback"):
            getattr(names, name)
    if options.trainer == "littrainer":
        importlib.import_module("littrainer.lightning_adapter.run_lightning").import_lightning()
    with tempfile.TemporaryDirectory() as root:
        counts = kill_often(options.trainer, Path(root), options.kills, options.seed)
    print(f"{options.trainer}, killed {options.kills} times: {dict(counts)}")
    if options.trainer == SIDES[0] and counts["exact"] < options.kills:
        sys.exit("not all were resumed exactly")


if __name__ == "__main__":
    main()
