"""How much memory does an evaluation of a language model take?

A tiny Llama with a large vocabulary is evaluated with a metric function, which is given the logits of all samples in
one array, and with a torchmetrics metric, which sees them batch by batch. Each evaluation runs in a process of its own.
Its peak is the largest resident set of the process less what was resident right before; what a first evaluation of a
few tokens loads is paid by then. The size of the arrays is that of logits and labels as the metric function gets them;
the peak holds the forward pass of a batch and its loss besides.
"""

from __future__ import annotations

import gc
import importlib
import tempfile
from typing import Any

import numpy as np
import torch

from ..benchmark import Benchmark, Case, Measured, Processes
from ..figures import Figures, markdown
from ..sides import OURS, THEIRS, Side
from ..stopwatch import MIB, largest_resident_bytes, resident_bytes
from ..trainings import silenced, trainer_arguments

VOCABULARY = 32_000
STREAMING = Side("littrainer, streaming metric", "littrainer", variant="streaming")


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that are made when they are read, so that the data takes no memory."""

    def __init__(self, samples: int, tokens: int) -> None:
        self.samples, self.tokens = samples, tokens

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + self.tokens) * 7 % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config)


def next_token_accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    right = [np.mean(row[:-1].argmax(axis=-1) == label[1:]) for row, label in zip(logits, labels, strict=True)]
    return {"accuracy": float(np.mean(right))}


def streaming_metric() -> Any:
    from torchmetrics.classification import MulticlassAccuracy

    return {"accuracy": MulticlassAccuracy(VOCABULARY, average="micro", validate_args=False)}


def measure(side: Side, samples: int, tokens: int, batch: int) -> Measured:
    """Peak of an evaluation over the memory before it, in MiB, and what it found."""
    names = importlib.import_module(side.library)
    with tempfile.TemporaryDirectory() as folder, silenced():
        trainer = names.Trainer(
            model=llama(),
            args=trainer_arguments(names, folder, per_device_eval_batch_size=batch),
            compute_metrics=streaming_metric() if side.variant == "streaming" else next_token_accuracy,
        )
        trainer.evaluate(Tokens(2, 8))
        gc.collect()
        before = resident_bytes()
        found = trainer.evaluate(Tokens(samples, tokens))
    # Logits in float32 and labels in int64.
    arrays = samples * tokens * (VOCABULARY * 4 + 8)
    return {
        "peak_mib": (largest_resident_bytes() - before) / MIB,
        "arrays_mib": arrays / MIB,
        "accuracy": found["eval_accuracy"],
    }


def cases(samples: tuple[int, ...], tokens: int, processes: Processes) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"samples-{number}",
            f"{number} samples",
            (THEIRS, OURS, STREAMING),
            {"samples": number, "tokens": tokens, "batch": 2},
            processes,
            curve="samples",
        )
        for number in samples
    )


def table(figures: Figures) -> str:
    rows = []
    for case in figures.cases:
        for side in figures.sides(case):
            peak, arrays = (figures.median(case, side, key) for key in ("peak_mib", "arrays_mib"))
            shown = figures.shown(side) + ("" if side == STREAMING.name else ", metric function")
            rows.append(
                (
                    shown,
                    str(figures.setting(case, "samples")),
                    f"{arrays:.0f}",
                    f"{peak:.0f}",
                    figures.spread(case, side, "peak_mib"),
                    f"{peak / arrays:.2f}",
                )
            )
    return markdown(("side", "samples", "arrays, MiB", "peak, MiB", "range", "peak / arrays"), rows)


def failures(figures: Figures) -> list[str]:
    """The sides evaluate the same, or their memory does not compare."""
    wrong = []
    for case in figures.cases:
        found = {round(figures.median(case, side, "accuracy"), 6) for side in figures.sides(case)}
        if len(found) > 1:
            wrong.append(f"the sides do not agree on the accuracy of {case}: {sorted(found)}")
    return wrong


BENCHMARK = Benchmark(
    name="evaluation_memory",
    question="How much memory does an evaluation of a language model take?",
    measure=measure,
    full=cases((6, 12, 24), tokens=256, processes=Processes.FRESH),
    short=cases((4,), tokens=8, processes=Processes.KEPT),
    rounds=1,
    tables={"evaluation-memory": table},
    failures=failures,
)
