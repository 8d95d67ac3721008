"""Trainings in which memory runs out, checked for lost steps and other numbers.

    python -m tests.faults.memory [--faults 30] [--in-two-processes 20] [--seed 1]

The loss is a mean over rows or labels, a sum divided by those of the window, or a script's; optimizer steps have 1 or 4
micro-batches, and there is no dropout. Memory runs out in the forward or backward pass of a random micro-batch, once or
twice, in one of the processes. With `auto_micro_batch` all steps must be taken, with the losses and weights of a
training with enough memory.
"""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.profilers import PassThroughProfiler
from torch import nn

from littrainer.distributed.collectives import all_gather_object
from tests.faults.in_processes import PROCESSES, RANK, run_faults
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, tag_rows, vector_rows
from tests.scenarios.models import (
    CountingClassifier,
    KeywordClassifier,
    VectorClassifier,
    tiny_bert_tagger,
    tiny_gpt2,
)
from tests.scenarios.trainers import Trainer, quiet_trainer

STEPS, BATCH_SIZE = 5, 5
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


class CustomLoss(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(x=inputs["x"])
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="sum")
        # DDP averages gradients.
        loss = loss / num_items_in_batch * self.args.world_size
        return (loss, outputs) if return_outputs else loss


def tagger() -> nn.Module:
    return tiny_bert_tagger(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


# Kind of loss -> model, rows, Trainer and arguments.
LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], type[Trainer], dict[str, Any]]] = {
    "mean": (VectorClassifier, vector_rows, Trainer, {}),
    "divided": (CountingClassifier, vector_rows, Trainer, {}),
    "tags": (tagger, tag_rows, Trainer, {}),
    "exact tags": (tagger, tag_rows, Trainer, {"loss_normalization": "exact"}),
    "own loss": (KeywordClassifier, vector_rows, CustomLoss, {}),
    "next tokens": (
        lambda: tiny_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        language_rows,
        Trainer,
        {},
    ),
    "smoothed tags": (tagger, tag_rows, Trainer, {"label_smoothing_factor": 0.1}),
}
PASSES = ("forward", "backward")


class Fault(NamedTuple):
    """A training in which memory runs out.

    Parameters:
        head: a key of `LOSSES`.
        place: forward or backward pass.
        step: the optimizer step, counted from 1.
        position: the micro-batch in the optimizer step.
        times: consecutive failures.
        by_lightning: use Lightning's loop instead of the fast loop.
    """

    head: str
    place: str
    step: int
    accumulation: int
    position: int = 0
    times: int = 1
    rank: int = 0
    by_lightning: bool = False

    @classmethod
    def draw(cls, source: random.Random, number: int) -> Fault:
        accumulation = (1, 4)[number // 2 % 2]
        return cls(
            list(LOSSES)[number % len(LOSSES)],
            PASSES[number % 2],
            source.randint(1, STEPS),
            accumulation,
            source.randrange(accumulation),
            source.randint(1, 2),
            source.randrange(PROCESSES),
            source.random() < 0.25,
        )


class RunsOut:
    """Hooks of a model in which memory runs out."""

    def __init__(self, model: Any, fault: Fault) -> None:
        self.fault, self.micro_batches, self.is_due = fault, 0, False
        model.times_left = fault.times
        model.register_forward_pre_hook(self.before)
        model.register_forward_hook(self.after)

    def before(self, model: Any, _: Any) -> None:
        if model.training:
            first = (self.fault.step - 1) * self.fault.accumulation + self.fault.position
            self.is_due = self.fault.rank == RANK and self.micro_batches >= first and model.times_left > 0
            self.micro_batches += 1
            if self.is_due and self.fault.place == "forward":
                self.fail(model)

    def after(self, model: Any, _: Any, outputs: Any) -> None:
        if model.training and self.is_due and self.fault.place == "backward":
            outputs["logits"].register_hook(lambda _: self.fail(model))

    def fail(self, model: Any) -> None:
        model.times_left -= 1
        raise torch.cuda.OutOfMemoryError(OUT_OF_MEMORY)


class OtherProfiler(PassThroughProfiler):
    """A profiler that selects Lightning's loop."""


def trained(folder: Path, fault: Fault, is_faulty: bool) -> Any:
    """Train with or without the fault."""
    make, rows, kind, arguments = LOSSES[fault.head]
    torch.manual_seed(0)
    model: Any = make()
    if is_faulty:
        RunsOut(model, fault)
    samples = rows(BATCH_SIZE * fault.accumulation * PROCESSES * STEPS - 1)
    options: dict[str, Any] = {"train_dataset": Rows(samples)}
    if "input_ids" in samples[0]:
        options["data_collator"] = pad_tokens
    if fault.by_lightning:
        options["lightning"] = {"profiler": OtherProfiler()}
    trainer = quiet_trainer(
        folder,
        model,
        kind=kind,
        trainer_kwargs=options,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=fault.accumulation,
        auto_micro_batch=is_faulty,
        optim="sgd",
        learning_rate=0.1,
        logging_strategy="steps",
        logging_steps=1,
        ddp_backend="gloo" if PROCESSES > 1 else None,
        **arguments,
    )
    trainer.train()
    return trainer


def seen_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return losses and weights of a training."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [parameter.detach().flatten() for parameter in trainer.model.parameters()]
    return {"losses": torch.tensor(losses), "weights": torch.cat(weights)}


def outcomes(number: int, seed: int, folder: Path) -> tuple[collections.Counter[str], str]:
    """Return counts of lost steps, and the largest difference of weights."""
    source, counts, largest = random.Random(seed), collections.Counter[str](), 0.0
    for index in range(number):
        fault = Fault.draw(source, index)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer, other = (trained(folder, fault, is_faulty) for is_faulty in (True, False))
        pending = sum(all_gather_object(trainer.model.times_left)) - (PROCESSES - 1) * fault.times
        now, expected = seen_of(trainer), seen_of(other)
        differences = {name: float((now[name] - value).abs().max()) for name, value in expected.items()}
        largest = max(largest, *all_gather_object(differences["weights"]))
        lost = STEPS - trainer.state.global_step
        is_well = not pending and max(all_gather_object(max(differences.values()))) <= 1e-6
        counts[f"{lost} steps lost{'' if is_well else ', other numbers'}"] += 1
        if RANK == 0 and (lost or not is_well):
            print(fault, f"{lost} steps lost, {pending} failures pending, differences {differences}", flush=True)
    return counts, f", weights differ by at most {largest:.1e}"


if __name__ == "__main__":
    logging.getLogger("littrainer").setLevel(logging.ERROR)
    sys.exit(run_faults("tests.faults.memory", outcomes, 30, "0 steps lost"))
