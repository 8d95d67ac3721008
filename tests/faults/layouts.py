"""Trainings that are stopped and resumed with other layouts: `python -m tests.faults.layouts` tries 100 sequences.

Each segment of a training has another batch size, accumulation, number of workers or of processes (1, 2, 4). In each
epoch every row must be trained once, except rows that fill the last global batch. The training must end at `max_steps`
and `num_train_epochs`, with the schedule at its end. Processes are forked from a process that has imported everything.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import random
import sys
import tempfile
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from littrainer import Trainer, TrainerCallback, TrainingArguments
from tests.distributed.process_launch import find_free_port
from tests.scenarios.data import Rows, SizedStream

FEATURES = 3


@dataclass
class Layout:
    """The batches of a segment, and the optimizer steps until its stop (0: never).

    With `dispatches` rank 0 reads for all processes, else each process reads a shard.
    """

    batch: int
    accumulation: int
    processes: int
    workers: int
    dispatches: bool
    steps: int


@dataclass
class Sequence:
    """A training in several segments; `strategy` is a `train_sampling_strategy` or "stream"."""

    rows: int
    epochs: int
    strategy: str
    segments: list[Layout]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)[:, 0]
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class NotingTrainer(Trainer):
    """A Trainer that records epoch and index of each trained row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: list[tuple[int, int]] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        epoch = self.training_run.epoch
        self.rows += [(epoch, index) for index in inputs.pop("index", torch.empty(0)).tolist()]
        return super().compute_loss(model, inputs, *args, **kwargs)


class CutAfter(TrainerCallback):
    """A callback that saves and stops after a number of optimizer steps."""

    def __init__(self, steps: int) -> None:
        self.remaining = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            control.should_save = control.should_training_stop = True


def samples(number: int) -> list[dict[str, Any]]:
    generator = random.Random(1)
    rows = [
        {"x": torch.tensor([generator.random() for _ in range(FEATURES)]), "index": index} for index in range(number)
    ]
    # With lengths for group_by_length.
    return [
        {**row, "labels": float(index), "input_ids": [0] * generator.randint(1, 9)} for index, row in enumerate(rows)
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    columns = {"labels": [row["labels"] for row in rows], "index": [row["index"] for row in rows]}
    return {
        "x": torch.stack([row["x"] for row in rows]),
        **{name: torch.tensor(column) for name, column in columns.items()},
    }


def train_segment(folder: Path, sequence: Sequence, segment: Layout) -> dict[str, Any]:
    """Train from the newest checkpoint to the stop or the end, and return rows and state."""
    is_stream = sequence.strategy == "stream"
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=sequence.epochs,
        per_device_train_batch_size=segment.batch,
        gradient_accumulation_steps=segment.accumulation,
        dataloader_num_workers=segment.workers,
        accelerator_config={"dispatch_batches": segment.dispatches},
        train_sampling_strategy="random" if is_stream else sequence.strategy,
        learning_rate=1e-3,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    torch.manual_seed(0)
    rows = samples(sequence.rows)
    trainer = NotingTrainer(
        model=Model(),
        args=arguments,
        train_dataset=SizedStream(rows) if is_stream else Rows(rows),
        data_collator=collate,
        callbacks=[CutAfter(segment.steps)],
    )
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    state = trainer.state
    return {
        "rows": trainer.rows,
        "step": state.global_step,
        "max_steps": state.max_steps,
        "epoch": state.epoch,
        "rate": trainer.lr_scheduler.get_last_lr()[0],
    }


def run_segment(root: Path, sequence: Sequence, segment: Layout) -> list[dict[str, Any]]:
    """Return the results of `train_segment` in each process; raise a RuntimeError if a process failed."""
    port, children = find_free_port(), []
    for rank in range(segment.processes):
        child = os.fork()
        if not child:
            _run_as(rank, port, root, sequence, segment)
        children.append(child)
    failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
    if failed:
        raise RuntimeError("\n".join((root / f"{rank}.log").read_text()[-3000:] for rank in failed))
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(segment.processes)]


def _run_as(rank: int, port: int, root: Path, sequence: Sequence, segment: Layout) -> None:
    status = 1
    try:
        with (root / f"{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if segment.processes > 1:
            names = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": segment.processes,
                "LOCAL_WORLD_SIZE": segment.processes,
            }
            os.environ.update({name: str(value) for name, value in names.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        (root / f"{rank}.json").write_text(json.dumps(train_segment(root / "run", sequence, segment)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def draw_sequence(generator: random.Random) -> Sequence:
    def layout(steps: int) -> Layout:
        processes, workers = generator.choice((1, 1, 2, 4)), generator.choice((0, 0, 0, 1))
        return Layout(
            generator.randint(1, 6), generator.randint(1, 3), processes, workers, generator.random() < 0.4, steps
        )

    strategy = generator.choice(("random", "random", "sequential", "group_by_length", "stream"))
    segments = [layout(generator.randint(1, 4)) for _ in range(generator.randint(1, 4))]
    return Sequence(generator.randint(9, 60), generator.randint(1, 2), strategy, [*segments, layout(0)])


def mistakes_in(sequence: Sequence, root: Path) -> list[str]:
    """Train all segments and return mistakes."""
    counts: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    filled: collections.Counter[int] = collections.Counter()
    for segment in sequence.segments:
        results = run_segment(root, sequence, segment)
        before = {epoch: rows.total() for epoch, rows in counts.items()}
        for epoch, index in (tuple(row) for result in results for row in result["rows"]):
            counts[epoch][index] += 1
        for epoch in counts:
            trained_before = before.get(epoch, 0)
            if segment.processes > 1 and counts[epoch].total() > max(sequence.rows, trained_before):
                # Dispatched batches are split evenly between the processes.
                multiple = segment.processes * (1 if segment.dispatches else segment.batch)
                filled[epoch] = (trained_before - sequence.rows) % multiple
        if results[0]["step"] == results[0]["max_steps"]:
            break
    mistakes = []
    for epoch in range(sequence.epochs):
        lost = sequence.rows - len(counts[epoch])
        doubled = counts[epoch].total() - len(counts[epoch]) - filled[epoch]
        if lost or doubled:
            mistakes.append(f"epoch {epoch}: {lost} rows lost, {doubled} doubled")
    last = results[0]
    if last["step"] != last["max_steps"] or last["epoch"] != sequence.epochs or abs(last["rate"]) > 1e-12:
        ends = ", ".join(f"{name} {last[name]}" for name in ("step", "max_steps", "epoch", "rate"))
        mistakes.append(f"ends at {ends}")
    return mistakes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100, help="how many sequences are tried (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="which sequences (default: 0)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    importlib.import_module("littrainer.lightning_adapter.run_lightning").import_lightning()
    generator = random.Random(options.seed)
    segments = wrong = 0
    for number in range(options.sequences):
        sequence = draw_sequence(generator)
        segments += len(sequence.segments)
        with tempfile.TemporaryDirectory() as root:
            mistakes = mistakes_in(sequence, Path(root))
        wrong += bool(mistakes)
        if mistakes:
            print(f"sequence {number}: {'; '.join(mistakes)}; {asdict(sequence)}", flush=True)
    print(f"{options.sequences} sequences of {segments} segments: {wrong} with rows lost or doubled")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
