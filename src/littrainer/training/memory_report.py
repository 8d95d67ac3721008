"""How much memory the stages of a Trainer's life took: construction, training, evaluation, prediction."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from littrainer.training.device_memory import empty_device_cache

CONSTRUCTION = "init"
# Between two looks at the size of the process. Looking without a pause would slow down what is measured.
SAMPLING_SECONDS = 0.001


class MemoryReport:
    """Measures stages and writes what they took into their metrics, all in bytes.

    `<stage>_mem_cpu_alloc_delta` is what a stage kept, `<stage>_mem_cpu_peaked_delta` what it held beyond that for a
    while, and their sum its greatest need; `_gpu_` likewise. A stage that begins while another one is measured, as an
    evaluation during training, is part of that one. The first report also tells about the construction.

    Parameters:
        is_wanted: whether to measure at all.

    Raises:
        ImportError: psutil, which knows the size of the process, is not installed.
    """

    def __init__(self, is_wanted: bool):
        self._stage: str | None = None
        self._at_start: dict[str, int] = {}
        self._taken: dict[str, dict[str, int]] = {}
        self._sampler: _PeakSampler | None = None
        self._end_of_sampling: Any = None
        self._construction_is_reported = False
        self._process: Any = _this_process() if is_wanted else None

    @contextmanager
    def measuring(self, stage: str) -> Iterator[None]:
        """Measure a block; `stop()` within it ends the stage and reports, an error ends it without a report."""
        began = self.start(stage)
        try:
            yield
        finally:
            if began and self._stage == stage:
                self._forget_stage()

    def start(self, stage: str) -> bool:
        """Begin a stage, and say whether it did; it does not where another one is measured."""
        if self._process is None or self._stage not in (None, stage):
            return False
        self._forget_stage()
        self._stage = stage
        gc.collect()
        empty_device_cache()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._at_start = self._in_use()
        self._sampler = _PeakSampler(self._process)
        # A Trainer whose construction fails is dropped in the middle of a stage.
        self._end_of_sampling = weakref.finalize(self, self._sampler.stop)
        return True

    def stop(self, stage: str, metrics: dict[str, Any] | None = None) -> None:
        """End a stage and add to its metrics what it took.

        Parameters:
            metrics: where to report; None keeps the numbers for the first report of another stage.
        """
        if self._process is None or self._stage != stage or self._sampler is None:
            return
        peak = {"cpu": self._sampler.stop()}
        gc.collect()
        empty_device_cache()
        if torch.cuda.is_available():
            peak["gpu"] = torch.cuda.max_memory_allocated()
        taken = {f"before_{stage}_mem_{where}": size for where, size in self._at_start.items()}
        for where, size in self._in_use().items():
            taken[f"{stage}_mem_{where}_alloc_delta"] = size - self._at_start[where]
            if where in peak:
                taken[f"{stage}_mem_{where}_peaked_delta"] = max(0, peak[where] - size)
        self._taken[stage] = taken
        self._forget_stage()
        if metrics is not None:
            self._report(stage, metrics)

    def _report(self, stage: str, metrics: dict[str, Any]) -> None:
        construction = {} if self._construction_is_reported else self._taken.get(CONSTRUCTION, {})
        self._construction_is_reported = True
        for taken in (construction, self._taken[stage]):
            for kind in ("_alloc_delta", "_peaked_delta"):
                metrics.update({name: size for name, size in taken.items() if name.endswith(kind)})
        metrics.update({name: size for name, size in construction.items() if name.startswith("before_")})

    def _forget_stage(self) -> None:
        if self._end_of_sampling is not None:
            self._end_of_sampling()
        self._end_of_sampling = None
        self._stage = self._sampler = None

    def _in_use(self) -> dict[str, int]:
        sizes = {"cpu": self._process.memory_info().rss}
        if torch.cuda.is_available():
            sizes["gpu"] = torch.cuda.memory_allocated()
        elif torch.backends.mps.is_available():
            sizes["gpu"] = torch.mps.current_allocated_memory()
        return sizes


class _PeakSampler:
    def __init__(self, process: Any):
        self._process = process
        self._peak = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLING_SECONDS):
            self._look()

    def _look(self) -> None:
        self._peak = max(self._peak, self._process.memory_info().rss)

    def stop(self) -> int:
        """Stop looking, and return the largest size seen in bytes."""
        self._look()
        self._is_over.set()
        return self._peak


def _this_process() -> Any:
    try:
        import psutil
    except ImportError as error:
        raise ImportError(
            "skip_memory_metrics=False reports the memory of the process, which takes psutil: install it with "
            "`pip install psutil`, or leave skip_memory_metrics at True."
        ) from error
    return psutil.Process()
