"""The steps of a training by a raw loop, this package and transformers."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from tests.scenarios.data import Rows
from tests.scenarios.trainers import QUIET_RUN

BATCH_SIZE = 4


def run_raw(
    model: Any, rows: list[Any], accumulation: int, at_step_end: Callable[[], None], collate: Any = default_collate
) -> None:
    """Compute the same as a Trainer in a raw torch loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model.train()
    loader = DataLoader(Rows(rows), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    for number, batch in enumerate(loader, start=1):
        outputs = model(**batch)
        (outputs["loss"] / accumulation).backward()
        if number % accumulation == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            at_step_end()


def run_side(
    side: str,
    folder: Path,
    model: Any,
    rows: list[Any],
    at_step_end: Callable[[], None],
    collate: Any = default_collate,
    **arguments: Any,
) -> None:
    """Train for one epoch by a raw loop, or by a library's Trainer with default callbacks."""
    accumulation = arguments.get("gradient_accumulation_steps", 1)
    if side == "raw":
        run_raw(model, rows, accumulation, at_step_end, collate)
        return
    library = importlib.import_module(side)

    class AtStepEnd(library.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            at_step_end()

    settings = {**QUIET_RUN, "per_device_train_batch_size": BATCH_SIZE, "num_train_epochs": 1, **arguments}
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        library.Trainer(
            model=model,
            args=library.TrainingArguments(output_dir=str(folder), **settings),
            train_dataset=Rows(rows),
            data_collator=collate,
            callbacks=[AtStepEnd()],
        ).train()


class CountedCalls:
    """Counts of Python calls between the ends of two optimizer steps."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.step = first, last, 0
        self.of_function: Counter[str] = Counter()

    def step_ended(self) -> None:
        self.step += 1
        if self.step == self.first:
            sys.setprofile(self._count)
        if self.step == self.last:
            sys.setprofile(None)

    def _count(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            self.of_function[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1

    @property
    def calls_per_step(self) -> float:
        return sum(self.of_function.values()) / (self.last - self.first)
