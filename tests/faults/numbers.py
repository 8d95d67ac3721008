"""Trainings with a non-finite number or spike at a random step: in the data, weights, gradients or loss.

    python -m tests.faults.numbers                60 faults in one process and 20 in two

Each training logs every third step, saves every second step and has two checkpoints. The fault must be reported at the
next log or earlier, with its step and first non-finite value; a checkpoint with finite weights must exist; `skip` must
end with finite weights and buffers, and `rollback` with the weights of a training without the rows of that step.
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
from littrainer.checkpoint.manager import get_last_checkpoint
from littrainer.distributed.collectives import all_gather_object
from tests.faults.in_processes import PROCESSES, RANK, run_faults
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, Trainer, quiet_trainer

STEPS, LOGGING_STEPS, SAVE_STEPS, BATCH_SIZE = 30, 3, 2, 2
# Kind -> text of the report.
KINDS = {
    "data": "the data, row",
    "weights": "the weights",
    "gradients": "First non-finite value: the gradients",
    "overflow": "First non-finite value: the loss",
    "spike": "the gradient norm is",
}
POLICIES = ("warn", "skip", "rollback", "stop")


class Fault(NamedTuple):
    """A fault in a training.

    Parameters:
        kind: a key of `KINDS`.
        step: the optimizer step, counted from 1.
        position: the micro-batch in the optimizer step.
    """

    kind: str
    policy: str
    step: int
    accumulation: int
    position: int
    rank: int
    is_stepwise: bool

    @classmethod
    def draw(cls, source: random.Random, number: int) -> Fault:
        kind, policy = list(KINDS)[number % len(KINDS)], POLICIES[number // len(KINDS) % len(POLICIES)]
        # A spike is compared with at least 20 norms.
        step = source.randint(21 if kind == "spike" else 3, STEPS - 1)
        accumulation = source.choice((1, 2, 3))
        at = source.randrange(accumulation), source.randrange(PROCESSES)
        return cls(kind, policy, step, accumulation, *at, source.random() < 0.25)

    @property
    def rows_of_step(self) -> range:
        """Return the rows of the faulty step, in all processes."""
        size = BATCH_SIZE * self.accumulation * PROCESSES
        return range((self.step - 1) * size, self.step * size)


class Faulty(VectorClassifier):
    """A model with a fault in the forward pass of a micro-batch, with dropout and the buffers of a batch norm."""

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


class WarningRecorder(logging.Handler):
    """A recorder of warnings with the optimizer step."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.trainer: Any = None
        self.texts: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append((self.trainer.state.global_step, record.getMessage()))


def trained(folder: Path, fault: Fault, policy: str, faulty: bool, recorder: WarningRecorder) -> Any:
    """Train with the fault, or without the rows of its step."""
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
        trainer_kwargs={"train_dataset": Rows(rows)},
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
        on_nonfinite=policy,
        spike_factor=50 if fault.kind == "spike" else None,
        ddp_backend="gloo" if PROCESSES > 1 else None,
    )
    recorder.trainer = trainer
    trainer.train()
    return trainer


def outcome_of(fault: Fault, folder: Path) -> str:
    """Return "well", or the failures."""
    recorder = WarningRecorder()
    loggers = logging.getLogger("littrainer")
    loggers.addHandler(recorder)
    error: UnhealthyTrainingError | None = None
    try:
        trained(folder / "faulty", fault, fault.policy, True, recorder)
    except UnhealthyTrainingError as raised:
        error = raised
        recorder.texts.append((recorder.trainer.state.global_step, str(raised)))
    finally:
        loggers.removeHandler(recorder)
    trainer = recorder.trainer
    failures = []
    texts = [entry for entries in all_gather_object(recorder.texts) for entry in entries]
    reports = [(step, text) for step, text in texts if f"Optimizer step {fault.step}:" in text]
    # A log cannot distinguish weights from the loss.
    causes = (KINDS[fault.kind], *(["or the weights"] if fault.kind == "weights" else []))
    if not reports:
        failures.append(f"not reported, but {texts}")
    elif reports[0][0] > math.ceil(fault.step / LOGGING_STEPS) * LOGGING_STEPS:
        failures.append(f"reported late, at {reports[0][0]}")
    elif not any(cause in reports[0][1] for cause in causes):
        failures.append(f"reported as {reports[0][1]}")
    finite = get_last_checkpoint(folder / "faulty")
    if finite is None:
        failures.append("no finite checkpoint")
    elif not all(weight.isfinite().all() for weight in load_file(Path(finite, "model.safetensors")).values()):
        failures.append(f"{finite} is not finite")
    is_finite = all(weight.isfinite().all() for weight in trainer.model.state_dict().values())
    if fault.policy == "rollback" or (fault.policy == "skip" and fault.kind != "weights"):
        if not is_finite or trainer.state.global_step != STEPS:
            failures.append(f"ended at step {trainer.state.global_step}, finite: {is_finite}")
    elif (error is not None) != (fault.policy in ("stop", "skip")) or (error is not None and error.step != fault.step):
        failures.append(f"ended with {error!r}")
    if fault.policy == "rollback":
        expected = trained(folder / "without", fault, "warn", False, recorder).model.state_dict()
        if any(not torch.equal(weight, expected[name]) for name, weight in trainer.model.state_dict().items()):
            failures.append("other weights")
    return "; ".join(text for each in all_gather_object(failures) for text in each) or "well"


def outcomes(number: int, seed: int, folder: Path) -> tuple[collections.Counter[str], str]:
    """Return counts of outcomes, and print failures."""
    source, counts = random.Random(seed), collections.Counter[str]()
    # Multiples of 7 mix kinds and policies.
    for index in range(PROCESSES - 1, number + PROCESSES - 1):
        fault = Fault.draw(source, index * 7)
        outcome = outcome_of(fault, folder / str(index))
        counts[outcome] += 1
        if outcome != "well" and RANK == 0:
            print(fault, outcome, flush=True)
    return counts, ""


if __name__ == "__main__":
    sys.exit(run_faults("tests.faults.numbers", outcomes, 60, "well"))
