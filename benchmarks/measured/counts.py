"""What does a step do, counted: Python calls, values read from the device, samples fetched?

Counts are the same however busy the machine is. Calls of Python functions are those that the interpreter's profiling
hook sees in the process's main thread, without those into C. A value that the host reads from a tensor makes it wait
for all that the device still has to do. "Requests" are the calls that fetch samples from a dataset which can hand out
many at once.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..benchmark import Benchmark, Case, Measured
from ..figures import Figures, markdown
from ..jobs import JOBS, Samples
from ..sides import EVERY_SIDE, OURS, Side
from ..trainings import Plan, prepared_training, silenced

# What waits for the device: the first one is below `item()`, `float()`, `bool()` and `tolist()`.
READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "unique2", "_unique2"}
COUNTED_FROM = 3
BATCH_SIZE = 8


class Reads(TorchDispatchMode):
    """Counts what reads a tensor's values on the host."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ in READS
        return function(*args, **(kwargs or {}))


class CountedRows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that are fetched one by one or many at once, both counted."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.requests = self.rows = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> Samples:
        self.requests += 1
        self.rows += len(indices)
        return [self.samples[index] for index in indices]


def measure(side: Side, job: str, steps: int, accumulation: int = 1) -> Measured:
    """What happens from the end of a step to the end of the next; the mean over steps in the midst of a training."""
    rows = CountedRows(JOBS[job].samples((steps + 2) * BATCH_SIZE * accumulation))
    reads = Reads()
    at_ends: list[Counter[str]] = []
    calls = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def step_ended() -> None:
        at_ends.append(Counter(calls=calls, reads=reads.count, requests=rows.requests, rows=rows.rows))

    with tempfile.TemporaryDirectory() as folder, silenced():
        plan = Plan(JOBS[job], folder, steps, BATCH_SIZE, accumulation, samples=rows)
        # Twice: reads are counted by a mode in Python, whose calls are not to be counted as well.
        train = prepared_training(side, plan, {"step_end": step_ended})
        # littrainer reads losses at once on a CPU, where nothing waits; counted is what it reads on a GPU.
        as_on_gpu = patch("littrainer.loop.loss.is_on_cpu", return_value=False) if side == OURS else nullcontext()
        with as_on_gpu, reads:
            train()
        with_reads, rows.requests, rows.rows = list(at_ends), 0, 0
        at_ends.clear()
        train = prepared_training(side, plan, {"step_end": step_ended})
        sys.setprofile(called)
        try:
            train()
        finally:
            sys.setprofile(None)
    # The last steps fetch nothing ahead any more.
    first, last = COUNTED_FROM - 1, steps - 3
    found = {"reads": (with_reads[last]["reads"] - with_reads[first]["reads"]) / (last - first)}
    for name in ("calls", "requests", "rows"):
        found[name] = (at_ends[last][name] - at_ends[first][name]) / (last - first)
    return found


def cases(steps: int) -> tuple[Case, ...]:
    title = JOBS["mlp"].title
    return (
        Case("mlp", title, EVERY_SIDE, {"job": "mlp", "steps": steps}, rounds=1),
        Case(
            "mlp-accumulation",
            f"{title}, 4 micro-batches a step",
            EVERY_SIDE,
            {"job": "mlp", "steps": steps, "accumulation": 4},
            rounds=1,
        ),
    )


def table(figures: Figures) -> str:
    rows = [
        (
            figures.title(case),
            figures.shown(side),
            f"{figures.median(case, side, 'calls'):.0f}",
            f"{figures.median(case, side, 'reads'):.0f}",
            f"{figures.median(case, side, 'requests'):.0f}",
            f"{figures.median(case, side, 'rows'):.0f}",
        )
        for case in figures.cases
        for side in figures.sides(case)
    ]
    columns = ("a step of", "side", "Python calls", "values read from the device", "requests for samples", "samples")
    return markdown(columns, rows, names=2)


def failures(figures: Figures) -> list[str]:
    """Nothing is read from the device, and each micro-batch is one request for its samples."""
    wrong = []
    for case in figures.cases:
        micro_batches = figures.cases[case]["settings"].get("accumulation", 1)
        wanted = {"reads": 0, "requests": micro_batches, "rows": micro_batches * BATCH_SIZE}
        for name, number in wanted.items():
            found = figures.median(case, OURS.name, name)
            if found != number:
                wrong.append(f"a step of {case} has {found:g} {name}, where it has to have {number}")
    return wrong


BENCHMARK = Benchmark(
    name="counts",
    question="What does a step do, counted?",
    measure=measure,
    full=cases(steps=30),
    short=cases(steps=12),
    rounds=1,
    tables={"counts": table},
    failures=failures,
)
