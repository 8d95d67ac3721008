"""Trainings that are cut and resumed with other layouts: `python -m tests.faults.layouts` tries 100 sequences of them.

Each part of a training has another batch size, accumulation, number of workers or of processes (1, 2, 4) than the one
before, and notes the rows whose optimizer step it took. In each epoch every row has to come once, but for those that
fill up the last round of several processes, as in a training that was not cut. The training ends at its `max_steps`
and its `num_train_epochs`, with the schedule at its end. Processes are forked from one that has imported everything.
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
from tests.distributed.together import find_free_port
from tests.scenarios.data import Rows, SizedStream

FEATURES = 3


@dataclass
class Layout:
    """How a part of a training forms its batches, and after how many optimizer steps it is cut (0: never).

    If `dispatches`, the first process reads for all; else each of several reads its own part.
    """

    batch: int
    accumulation: int
    processes: int
    workers: int
    dispatches: bool
    steps: int


@dataclass
class Sequence:
    """A training in several parts; `strategy` is a `train_sampling_strategy`, or a stream."""

    rows: int
    epochs: int
    strategy: str
    parts: list[Layout]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)[:, 0]
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class NotingTrainer(Trainer):
    """Notes the epoch and the index of each row that it trains."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: list[tuple[int, int]] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        epoch = self.training_run.epoch
        self.rows += [(epoch, index) for index in inputs.pop("index", torch.empty(0)).tolist()]
        return super().compute_loss(model, inputs, *args, **kwargs)


class CutAfter(TrainerCallback):
    """Saves and stops after some optimizer steps of a call."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            control.should_save = control.should_training_stop = True


def samples(number: int) -> list[dict[str, Any]]:
    drawn = random.Random(1)
    rows = [{"x": torch.tensor([drawn.random() for _ in range(FEATURES)]), "index": index} for index in range(number)]
    # Lengths by which they are sorted.
    return [{**row, "labels": float(index), "input_ids": [0] * drawn.randint(1, 9)} for index, row in enumerate(rows)]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    columns = {"labels": [row["labels"] for row in rows], "index": [row["index"] for row in rows]}
    return {"x": torch.stack([row["x"] for row in rows]), **{name: torch.tensor(one) for name, one in columns.items()}}


def train_part(folder: Path, sequence: Sequence, part: Layout) -> dict[str, Any]:
    """Train up to the cut or the end, from the newest checkpoint, and return what was seen."""
    is_stream = sequence.strategy == "stream"
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=sequence.epochs,
        per_device_train_batch_size=part.batch,
        gradient_accumulation_steps=part.accumulation,
        dataloader_num_workers=part.workers,
        accelerator_config={"dispatch_batches": part.dispatches},
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
        callbacks=[CutAfter(part.steps)],
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


def carried_out(root: Path, sequence: Sequence, part: Layout) -> list[dict[str, Any]]:
    """What each process of a part has seen.

    Raises:
        RuntimeError: one of them has failed.
    """
    port, children = find_free_port(), []
    for rank in range(part.processes):
        child = os.fork()
        if not child:
            _run_as(rank, port, root, sequence, part)
        children.append(child)
    failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
    if failed:
        raise RuntimeError("\n".join((root / f"{rank}.log").read_text()[-3000:] for rank in failed))
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(part.processes)]


def _run_as(rank: int, port: int, root: Path, sequence: Sequence, part: Layout) -> None:
    status = 1
    try:
        with (root / f"{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if part.processes > 1:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": part.processes, "LOCAL_WORLD_SIZE": part.processes}
            os.environ.update({name: str(value) for name, value in names.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        (root / f"{rank}.json").write_text(json.dumps(train_part(root / "run", sequence, part)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def drawn_sequence(drawn: random.Random) -> Sequence:
    def layout(steps: int) -> Layout:
        processes, workers = drawn.choice((1, 1, 2, 4)), drawn.choice((0, 0, 0, 1))
        return Layout(drawn.randint(1, 6), drawn.randint(1, 3), processes, workers, drawn.random() < 0.4, steps)

    strategy = drawn.choice(("random", "random", "sequential", "group_by_length", "stream"))
    parts = [layout(drawn.randint(1, 4)) for _ in range(drawn.randint(1, 4))]
    return Sequence(drawn.randint(9, 60), drawn.randint(1, 2), strategy, [*parts, layout(0)])


def mistakes_in(sequence: Sequence, root: Path) -> list[str]:
    """Train in all parts; what is not as it should be at the end."""
    seen: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    filled: collections.Counter[int] = collections.Counter()
    for part in sequence.parts:
        found = carried_out(root, sequence, part)
        before = {epoch: rows.total() for epoch, rows in seen.items()}
        for epoch, index in (tuple(row) for process in found for row in process["rows"]):
            seen[epoch][index] += 1
        for epoch in seen:
            trained_before = before.get(epoch, 0)
            if part.processes > 1 and seen[epoch].total() > max(sequence.rows, trained_before):
                # The batches that one reads for all are cut into as many rows for each.
                round_of_all = part.processes * (1 if part.dispatches else part.batch)
                filled[epoch] = (trained_before - sequence.rows) % round_of_all
        if found[0]["step"] == found[0]["max_steps"]:
            break
    mistakes = []
    for epoch in range(sequence.epochs):
        lost = sequence.rows - len(seen[epoch])
        doubled = seen[epoch].total() - len(seen[epoch]) - filled[epoch]
        if lost or doubled:
            mistakes.append(f"epoch {epoch}: {lost} rows lost, {doubled} doubled")
    last = found[0]
    if last["step"] != last["max_steps"] or last["epoch"] != sequence.epochs or abs(last["rate"]) > 1e-12:
        ends = ", ".join(f"{name} {last[name]}" for name in ("step", "max_steps", "epoch", "rate"))
        mistakes.append(f"it ends at {ends}")
    return mistakes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100, help="how many sequences are tried (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="which sequences (default: 0)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    importlib.import_module("littrainer.lightning_adapter.run_lightning").import_lightning()
    drawn = random.Random(options.seed)
    parts = wrong = 0
    for number in range(options.sequences):
        sequence = drawn_sequence(drawn)
        parts += len(sequence.parts)
        with tempfile.TemporaryDirectory() as root:
            mistakes = mistakes_in(sequence, Path(root))
        wrong += bool(mistakes)
        if mistakes:
            print(f"sequence {number}: {'; '.join(mistakes)}; {asdict(sequence)}", flush=True)
    print(f"{options.sequences} sequences of {parts} parts: {wrong} with rows lost or doubled")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
