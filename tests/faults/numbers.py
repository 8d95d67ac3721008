"""Trainings in which a number goes wrong at a random step: in the data, weights, gradients or loss, or as a spike.

    python -m tests.faults.numbers                60 faults in one process and 20 in two

Each training logs every third step, saves every second one and keeps two checkpoints. What went wrong has to be told at
the next log at the latest, with its step and with what was wrong first; a checkpoint with finite weights has to be
there; `skip` has to end with finite weights and buffers, and `rollback` with the very weights of a training whose data
lacks the rows of that optimizer step.
"""

from __future__ import annotations

import collections
import logging
import math
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from littrainer import UnhealthyTrainingError
from littrainer.checkpoint.verification import get_last_checkpoint
from littrainer.distributed.collectives import all_gather_object
from tests.faults.in_processes import PROCESSES, RANK, run_faults
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, Trainer, quiet_trainer

STEPS, LOGGING_STEPS, SAVE_STEPS, BATCH_SIZE = 30, 3, 2, 2
# What is named as wrong first; at a log it is too late to tell weights from the loss.
KINDS = {
    "data": "the data, row",
    "weights": "the weights",
    "gradients": "Not finite first: the gradients",
    "overflow": "Not finite first: the loss",
    "spike": "the gradient norm is",
}
WAYS = ("warn", "skip", "rollback", "stop")


class Fault(NamedTuple):
    """A training in which something goes wrong once.

    Parameters:
        kind: a key of `KINDS`.
        step: the optimizer step, counted from 1.
        position: the micro-batch of its window, and the process, in which it does.
    """

    kind: str
    way: str
    step: int
    accumulation: int
    position: int
    rank: int
    is_stepwise: bool

    @classmethod
    def drawn(cls, source: random.Random, number: int) -> Fault:
        kind, way = list(KINDS)[number % len(KINDS)], WAYS[number // len(KINDS) % len(WAYS)]
        # A spike is one that is compared with at least 20 norms.
        step = source.randint(21 if kind == "spike" else 3, STEPS - 1)
        accumulation = source.choice((1, 2, 3))
        at = source.randrange(accumulation), source.randrange(PROCESSES)
        return cls(kind, way, step, accumulation, *at, source.random() < 0.25)

    @property
    def rows_of_step(self) -> range:
        """The rows of the faulty step, in all processes."""
        size = BATCH_SIZE * self.accumulation * PROCESSES
        return range((self.step - 1) * size, self.step * size)


class Faulty(VectorClassifier):
    """Does what a fault says, once, in the forward pass of its micro-batch; has dropout, which random states decide.

    Its batch norm has buffers, which a forward pass changes.
    """

    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        self.dropout, self.batch_norm = torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(6)
        self.fault = fault
        self.micro_batches = 0

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return super().logits(self.dropout(self.batch_norm(x)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        fault, now = self.fault, self.micro_batches
        self.micro_batches += 1
        at = None if fault is None else (fault.step - 1) * fault.accumulation + fault.position
        is_due = now == at and fault is not None and (fault.rank == RANK or fault.kind == "weights")
        kind = fault.kind if fault is not None and is_due else None
        if kind == "weights":
            with torch.no_grad():
                self.inner.weight[1, 2] = math.nan
        outputs = super().forward(x, labels)
        if kind == "gradients":
            outputs["logits"].register_hook(lambda gradient: gradient * math.inf)
        if kind == "overflow":
            outputs["loss"] = outputs["loss"] * 3e38 * 3e38
        if kind == "spike":
            outputs["loss"] = outputs["loss"] * 1e5
        return outputs


class Told(logging.Handler):
    """Notes warnings, each with the optimizer steps done."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.trainer: Any = None
        self.texts: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append((self.trainer.state.global_step, record.getMessage()))


def trained(folder: Path, fault: Fault, way: str, faulty: bool, told: Told) -> Any:
    """A training with the fault, or one whose data lacks the rows of its step."""
    rows = vector_rows(BATCH_SIZE * fault.accumulation * PROCESSES * (STEPS + 2))
    if faulty and fault.kind == "data":
        number = fault.rows_of_step[fault.position * BATCH_SIZE * PROCESSES + fault.rank * BATCH_SIZE]
        rows[number]["x"] = torch.where(torch.arange(6) == 4, math.nan, rows[number]["x"])
    if not faulty:
        rows = [row for number, row in enumerate(rows) if number not in fault.rows_of_step]
    torch.manual_seed(0)
    trainer = quiet_trainer(
        folder,
        Faulty(fault if faulty else None),
        kind=StepwiseTrainer if fault.is_stepwise else Trainer,
        given={"train_dataset": Rows(rows)},
        max_steps=STEPS,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=fault.accumulation,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        logging_strategy="steps",
        logging_steps=LOGGING_STEPS,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        on_nonfinite=way,
        spike_factor=50 if fault.kind == "spike" else None,
        ddp_backend="gloo" if PROCESSES > 1 else None,
    )
    told.trainer = trainer
    trainer.train()
    return trainer


def outcome_of(fault: Fault, folder: Path) -> str:
    """`well`, or what is not as it has to be; trainings write below the folder."""
    told = Told()
    loggers = logging.getLogger("littrainer")
    loggers.addHandler(told)
    error: UnhealthyTrainingError | None = None
    try:
        trained(folder / "faulty", fault, fault.way, True, told)
    except UnhealthyTrainingError as raised:
        error = raised
        told.texts.append((told.trainer.state.global_step, str(raised)))
    finally:
        loggers.removeHandler(told)
    trainer = told.trainer
    wrong = []
    texts = [one for each in all_gather_object(told.texts) for one in each]
    about = [(step, text) for step, text in texts if f"Optimizer step {fault.step}:" in text]
    if not about:
        wrong.append(f"not told, but {texts}")
    elif about[0][0] > math.ceil(fault.step / LOGGING_STEPS) * LOGGING_STEPS:
        wrong.append(f"told late, at {about[0][0]}")
    elif KINDS[fault.kind] not in about[0][1] and not (fault.kind == "weights" and "or the weights" in about[0][1]):
        wrong.append(f"told as {about[0][1]}")
    healthy = get_last_checkpoint(folder / "faulty")
    if healthy is None:
        wrong.append("no healthy checkpoint")
    elif not all(part.isfinite().all() for part in load_file(Path(healthy, "model.safetensors")).values()):
        wrong.append(f"{healthy} is not healthy")
    is_finite = all(part.isfinite().all() for part in trainer.model.state_dict().values())
    if fault.way == "rollback" or (fault.way == "skip" and fault.kind != "weights"):
        if not is_finite or trainer.state.global_step != STEPS:
            wrong.append(f"ended at step {trainer.state.global_step}, finite: {is_finite}")
    elif (error is not None) != (fault.way in ("stop", "skip")) or (error is not None and error.step != fault.step):
        wrong.append(f"ended with {error!r}")
    if fault.way == "rollback":
        expected = trained(folder / "without", fault, "warn", False, told).model.state_dict()
        if any(not torch.equal(part, expected[name]) for name, part in trainer.model.state_dict().items()):
            wrong.append("other weights")
    return "; ".join(text for each in all_gather_object(wrong) for text in each) or "well"


def outcomes(number: int, seed: int, folder: Path) -> tuple[collections.Counter[str], str]:
    """What becomes of so many faults; those that do not go well are printed."""
    source, found = random.Random(seed), collections.Counter[str]()
    # In an order in which a few are of several kinds and ways.
    for one in range(PROCESSES - 1, number + PROCESSES - 1):
        fault = Fault.drawn(source, one * 7)
        outcome = outcome_of(fault, folder / str(one))
        found[outcome] += 1
        if outcome != "well" and RANK == 0:
            print(fault, outcome, flush=True)
    return found, ""


if __name__ == "__main__":
    sys.exit(run_faults("tests.faults.numbers", outcomes, 60, "well"))
