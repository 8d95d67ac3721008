"""A training in which memory runs out, for tests of `auto_micro_batch`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.profilers import PassThroughProfiler
from torch import nn

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
        loss = loss / num_items_in_batch
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
    by_lightning: bool = False


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
            self.is_due = self.micro_batches >= first and model.times_left > 0
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
    samples = rows(BATCH_SIZE * fault.accumulation * STEPS - 1)
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
        **arguments,
    )
    trainer.train()
    return trainer


def seen_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return losses and weights of a training."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [parameter.detach().flatten() for parameter in trainer.model.parameters()]
    return {"losses": torch.tensor(losses), "weights": torch.cat(weights)}
