"""Metrics for users: tables, JSON files, memory use and input tokens; and why a training ended."""

from __future__ import annotations

import datetime
import json
import logging
import math
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from littrainer.callbacks.state import COMPLETED, PATIENCE_COUNTER, describe_early_stop
from littrainer.data.packing import count_document_tokens
from littrainer.distributed.collectives import sum_across_processes
from littrainer.loop.out_of_memory import free_memory
from littrainer.runtime.atomic_files import write_atomically

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState

logger = logging.getLogger(__name__)


def find_end_reason(
    args: TrainingArguments,
    state: TrainerState,
    callbacks: Iterable[Any],
    stop_signal: str | None,
    ended_by: str | None,
) -> str:
    """Return why a training ended without an error.

    Parameters:
        stop_signal: name of the signal that stopped the training.
        ended_by: the argument that ended the training, as in its metrics.
    """
    if state.global_step >= state.max_steps:
        return COMPLETED
    if stop_signal is not None or ended_by is not None:
        return f"stopped by {stop_signal or f'{ended_by}={args.max_minutes:g}'}"
    counters = [
        (getattr(callback, "early_stopping_patience", math.inf), getattr(callback, PATIENCE_COUNTER, 0))
        for callback in callbacks
    ]
    early_stop = describe_early_stop(counters, args.metric_for_best_model)
    return early_stop or "stopped before its last step, by a callback, a file STOP or the end of a stream"


def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
    """Format times as h:mm:ss.cc, memory in MB, operations in GF, and other numbers with four decimals."""
    return {name: _format_value(name, value) for name, value in metrics.items()}


def _format_value(name: str, value: Any) -> Any:
    if "_mem_" in name and isinstance(value, int):
        return f"{value >> 20}MB"
    if "_runtime" in name and _is_finite_number(value):
        hundredths = int(abs(value - int(value)) * 100)
        return f"{datetime.timedelta(seconds=int(value))}.{hundredths:02d}"
    if name == "total_flos" and _is_finite_number(value):
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def print_metrics(split: str, metrics: dict[str, Any]) -> None:
    formatted = metrics_format(metrics)
    name_width = max(map(len, formatted), default=0)
    value_width = max((len(str(value)) for value in formatted.values()), default=0)
    print(f"***** {split} metrics *****")
    for name in sorted(formatted):
        print(f"  {name:<{name_width}} = {_align_right(formatted[name], value_width)}")


def _align_right(value: Any, width: int) -> str:
    try:
        return f"{value:>{width}}"
    except (TypeError, ValueError):
        # None, lists, dicts and tensors support no format.
        return f"{value!s:>{width}}"


def save_metrics(output_dir: str, split: str, metrics: dict[str, Any], combined: bool) -> None:
    """Write `<split>_results.json`, and add the metrics to `all_results.json` if `combined`.

    Raises:
        TypeError: a metric has no form in JSON.
        ValueError: `all_results.json` contains no metrics; it is not changed.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}_results.json"
    write_atomically(path, _dump_json(path, metrics))
    if combined:
        path = folder / "all_results.json"
        write_atomically(path, _dump_json(path, {**_read_results(path), **metrics}))


def _dump_json(path: Path, metrics: dict[str, Any]) -> str:
    try:
        return json.dumps(metrics, indent=4, sort_keys=True)
    except (TypeError, ValueError) as error:
        for name, value in metrics.items():
            try:
                json.dumps({name: value})
            except (TypeError, ValueError):
                raise TypeError(
                    f"{path} cannot hold the metric {name!r}: {value!r} is a {type(value).__name__}, for which JSON "
                    "has no form. Make it a number, a text or a list of them (.item(), .tolist()); nothing was written."
                ) from error
        raise


def _read_results(path: Path) -> dict[str, Any]:
    try:
        return {**json.loads(path.read_text("utf-8"))} if path.exists() else {}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} holds no metrics ({error}), so these were not added to it. Mend it, or move it away and save the "
            "metrics again; those of this call are in the file of their split."
        ) from error


CONSTRUCTION = "init"
SAMPLING_INTERVAL_S = 0.001


class MemoryReport:
    """Memory use of stages in bytes, as metrics.

    `<stage>_mem_cpu_alloc_delta` is the memory that a stage allocated and did not free, `<stage>_mem_cpu_peaked_delta`
    the peak above it; `_gpu_` is the same on the GPU. The first report includes the construction.
    """

    def __init__(self, is_enabled: bool):
        self._stage: str | None = None
        self._at_start: dict[str, int] = {}
        self._usage: dict[str, dict[str, int]] = {}
        self._sampler: _PeakSampler | None = None
        self._stop_sampling: Any = None
        self._has_reported_construction = False
        self._process: Any = _get_process() if is_enabled else None

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Measure a block, in which `stop()` reports; an error ends the stage without a report."""
        has_started = self.start(stage)
        try:
            yield
        finally:
            if has_started and self._stage == stage:
                self._reset_stage()

    def start(self, stage: str) -> bool:
        """Start a stage, unless it is part of another, and return whether it has started."""
        if self._process is None or self._stage not in (None, stage):
            return False
        self._reset_stage()
        self._stage = stage
        free_memory()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._at_start = self._read_usage()
        self._sampler = _PeakSampler(self._process)
        # A Trainer whose construction fails is freed within a stage.
        self._stop_sampling = weakref.finalize(self, self._sampler.stop)
        return True

    def stop(self, stage: str, metrics: dict[str, Any] | None = None) -> None:
        """End a stage and add its memory use to the metrics; None defers it to the first report of another stage."""
        if self._process is None or self._stage != stage or self._sampler is None:
            return
        peak = {"cpu": self._sampler.stop()}
        free_memory()
        if torch.cuda.is_available():
            peak["gpu"] = torch.cuda.max_memory_allocated()
        usage = {f"before_{stage}_mem_{device}": size for device, size in self._at_start.items()}
        for device, size in self._read_usage().items():
            usage[f"{stage}_mem_{device}_alloc_delta"] = size - self._at_start[device]
            if device in peak:
                usage[f"{stage}_mem_{device}_peaked_delta"] = max(0, peak[device] - size)
        self._usage[stage] = usage
        self._reset_stage()
        if metrics is not None:
            self._report(stage, metrics)

    def _report(self, stage: str, metrics: dict[str, Any]) -> None:
        construction = {} if self._has_reported_construction else self._usage.get(CONSTRUCTION, {})
        self._has_reported_construction = True
        for usage in (construction, self._usage[stage]):
            for kind in ("_alloc_delta", "_peaked_delta"):
                metrics.update({name: size for name, size in usage.items() if name.endswith(kind)})
        metrics.update({name: size for name, size in construction.items() if name.startswith("before_")})

    def _reset_stage(self) -> None:
        if self._stop_sampling is not None:
            self._stop_sampling()
        self._stop_sampling = self._stage = self._sampler = None

    def _read_usage(self) -> dict[str, int]:
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
        while not self._is_over.wait(SAMPLING_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        self._peak = max(self._peak, self._process.memory_info().rss)

    def stop(self) -> int:
        """Stop sampling, and return the peak in bytes."""
        self._sample()
        self._is_over.set()
        return self._peak


def _get_process() -> Any:
    try:
        import psutil
    except ImportError as error:
        raise ImportError(
            "skip_memory_metrics=False reports the memory of the process, which takes psutil: install it with "
            "`pip install psutil`, or leave skip_memory_metrics at True."
        ) from error
    return psutil.Process()


class InputTokenCounter:
    """A counter for `include_num_input_tokens_seen`."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def count(self, inputs: Any, args: TrainingArguments, model: Any, processing_class: Any, copies: int) -> int:
        """Return the tokens in a micro-batch of all processes; 0 with a warning if they cannot be counted."""
        main_input = getattr(model, "main_input_name", "input_ids")
        if main_input not in inputs:
            self._warn_once(f"Input tokens are not counted: the batch has no {main_input!r} (model.main_input_name).")
            return 0
        number = self._count_local(inputs, inputs[main_input], args, processing_class)
        return int(sum_across_processes(number, args.device, copies))

    def _count_local(self, inputs: Any, token_ids: Any, args: TrainingArguments, processing_class: Any) -> int:
        if args.include_num_input_tokens_seen == "non_padding":
            if "attention_mask" in inputs:
                return int(inputs["attention_mask"].sum())
            if args.pack_to_length is not None and "position_ids" in inputs:
                return int(count_document_tokens(inputs["position_ids"]))
            padding = getattr(processing_class, "pad_token_id", None)
            if padding is not None:
                return int((token_ids != padding).sum())
            self._warn_once("Padding tokens are counted too: there is neither an attention mask nor a pad_token_id.")
        return int(token_ids.numel())

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)
