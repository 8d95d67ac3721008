"""The time log of a training (`log_speed`): times of its parts, throughput and remaining time."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.process import get_matmul_precision
from littrainer.callbacks.log_history import SPEED_PREFIX, TIME_PARTS, suggest_speedup
from littrainer.data.loaders import find_batch_size
from littrainer.data.packing import count_document_tokens
from littrainer.distributed.collectives import gather_across_processes

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

MAX_EVENTS = 4096
# Word in a GPU's name -> peak FLOPS on dense matrices in 16 bits, TF32 and float32.
PEAK_FLOPS: dict[str, tuple[float, float, float]] = {
    "B200": (2250e12, 1100e12, 75e12),
    "H200": (989e12, 494e12, 67e12),
    "H100 PCIe": (756e12, 378e12, 51e12),
    "H100": (989e12, 494e12, 67e12),
    "A100": (312e12, 156e12, 19.5e12),
    "L40S": (362e12, 183e12, 91e12),
    "L4": (121e12, 60e12, 30e12),
    "V100": (125e12, 15.7e12, 15.7e12),
    "T4": (65e12, 8.1e12, 8.1e12),
    "RTX 4090": (165e12, 82.6e12, 82.6e12),
}


def get_peak_flops(device: torch.device, is_half: bool) -> float | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    kind = 0 if is_half else 1 if get_matmul_precision() in ("high", "medium", "tf32") else 2
    return next((peaks[kind] for part, peaks in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", name)), None)


class NoSpeedLog:
    """A null object for `SpeedLog`; builtins cost a step no Python call."""

    begin = enter = count = staticmethod(id)
    during = staticmethod(nullcontext)
    logs = summary = staticmethod(lambda *_: {})


class SpeedLog:
    """Times of the parts of a training, and its throughput.

    On a GPU `enter` records an event in the stream; events are read at logs only, so that parts have the GPU's time
    without a device sync.

    Parameters:
        padding_id: padding token, for batches without attention mask.
        copies: neighbouring processes with the same samples, as under tensor parallelism.
    """

    def __init__(self, args: TrainingArguments, model: Any, padding_id: int | None, copies: int):
        self._args, self._padding_id, self._copies = args, padding_id, copies
        self._main_input = getattr(model, "main_input_name", "input_ids")
        self._on_gpu = args.device.type == "cuda"
        # Cached, since a query costs several calls.
        self._stream = torch.cuda.current_stream(args.device) if self._on_gpu else None
        is_half = args.bf16 or args.fp16 or getattr(model, "dtype", torch.float32) is not torch.float32
        self._peak_flops = get_peak_flops(args.device, is_half)
        self._part, self._since = "other", 0.0
        self._seconds = dict.fromkeys(TIME_PARTS, 0.0)
        self._times: Counter[str] = Counter()
        self._events: list[tuple[str, Any]] = []
        self._idle_events: list[Any] = []
        self._samples = self._tokens = 0
        self._real_tokens: torch.Tensor | None = None
        # Largest share of the interval in which a process waited for data.
        self._slowest: float | None = None
        # Sums over all intervals, and the first interval, in which workers start and kernels are tuned.
        self._total: Counter[str] = Counter()
        self._first: Counter[str] = Counter()
        self._flops_before, self._steps_before = 0.0, 0
        self._advice: str | None = None

    def begin(self, state: TrainerState) -> None:
        self._flops_before, self._steps_before = state.total_flos, state.global_step
        self._since = perf_counter()
        self.enter("other")

    def enter(self, part: str) -> None:
        """Begin a part of `TIME_PARTS`."""
        if self._on_gpu:
            if not self._idle_events:
                self._read_events()
            event = self._idle_events.pop()
            event.record(self._stream)
            self._events.append((part, event))
        else:
            now = perf_counter()
            self._seconds[self._part] += now - self._since
            self._since = now
        self._part = part
        self._times[part] += 1

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Run a block as a part, and continue the current part after it."""
        outer = self._part
        if outer != part:
            self.enter(part)
        try:
            yield
        finally:
            if outer != part:
                self.enter(outer)

    def _read_events(self) -> None:
        """Add the times between completed events, and keep the newest."""
        done = len(self._events)
        while done and not self._events[done - 1][1].query():
            done //= 2
        for (part, event), (_, following) in zip(self._events[: done - 1], self._events[1:done], strict=False):
            self._seconds[part] += event.elapsed_time(following) / 1000
            self._idle_events.append(event)
        del self._events[: max(done - 1, 0)]
        if not self._idle_events:
            self._idle_events = [torch.cuda.Event(enable_timing=True) for _ in range(MAX_EVENTS)]

    def count(self, window: list[Any]) -> None:
        """Count samples and tokens of micro-batches, without a device sync."""
        for inputs in window:
            # `data` of a BatchEncoding, whose methods take several calls.
            fields = inputs if type(inputs) is dict else getattr(inputs, "data", None)
            fields = fields if type(fields) is dict else {}
            first: Any = next(iter(fields.values()), None)
            is_plain = isinstance(first, torch.Tensor) and first.dim()
            self._samples += first.shape[0] if is_plain else find_batch_size(inputs) or 0
            tokens = fields.get(self._main_input)
            if not isinstance(tokens, torch.Tensor) or tokens.dtype.is_floating_point:
                continue
            self._tokens += tokens.numel()
            mask = fields.get("attention_mask")
            if self._args.pack_to_length is not None and "position_ids" in fields:
                real = count_document_tokens(fields["position_ids"])
            elif mask is not None and mask.shape == tokens.shape:
                real = mask.sum(dtype=torch.long)
            elif self._padding_id is not None:
                real = (tokens != self._padding_id).sum()
            else:
                continue
            self._real_tokens = real if self._real_tokens is None else self._real_tokens + real

    def logs(self, state: TrainerState, control: TrainerControl) -> dict[str, float]:
        """Return the logs since the last log; a collective."""
        interval = self._end_interval(state)
        self._total.update(interval)
        if self._first:
            self._advise()
        else:
            self._first.update(interval)
        logs = self._compute_throughput(interval)
        if self._slowest is not None:
            logs[f"{SPEED_PREFIX}slowest_data_share"] = round(self._slowest, 4)
        logs[f"{SPEED_PREFIX}seconds_left"] = round(self._estimate_remaining_seconds(state, control), 1)
        return logs

    def summary(self, state: TrainerState) -> dict[str, float]:
        self._total.update(self._end_interval(state))
        self._advise()
        return self._compute_throughput(self._total)

    def _end_interval(self, state: TrainerState) -> dict[str, float]:
        """Return the counts of all processes and times of this process since the last call."""
        self.enter(self._part)
        if self._on_gpu:
            self._events[-1][1].synchronize()
            self._read_events()
        seconds, self._seconds = self._seconds, dict.fromkeys(TIME_PARTS, 0.0)
        counts = [self._samples, self._tokens, 0, seconds["data"] / (sum(seconds.values()) or 1.0)]
        self._samples = self._tokens = 0
        kind = torch.float32 if self._args.device.type == "mps" else torch.float64
        row = torch.tensor([counts], dtype=kind, device=self._args.device)
        if self._real_tokens is not None:
            row[0, 2] = self._real_tokens
            self._real_tokens.zero_()
        rows = gather_across_processes(row).tolist()
        samples, tokens, real_tokens, _ = (sum(column[:: self._copies]) for column in zip(*rows, strict=True))
        self._slowest = max(row[-1] for row in rows) if len(rows) > 1 else None
        flops, steps = state.total_flos - self._flops_before, state.global_step - self._steps_before
        self._flops_before, self._steps_before = state.total_flos, state.global_step
        training = sum(seconds[part] for part in TIME_PARTS if part not in ("evaluation", "save"))
        amounts = {"samples": samples, "tokens": tokens, "real_tokens": real_tokens, "flops": flops, "steps": steps}
        return {**seconds, **amounts, "training": training}

    def _compute_throughput(self, interval: Mapping[str, float]) -> dict[str, float]:
        training = interval["training"] or math.inf
        logs = {f"{part}_seconds": interval[part] for part in TIME_PARTS}
        logs["samples_per_second"] = interval["samples"] / training
        if interval["tokens"]:
            logs["tokens_per_second"] = interval["tokens"] / training
        if self._real_tokens is not None and interval["tokens"]:
            logs["padding_share"] = 1 - interval["real_tokens"] / interval["tokens"]
        if self._peak_flops is not None and interval["flops"]:
            logs["flops_utilization"] = interval["flops"] / training / self._peak_flops / self._args.world_size
        return {f"{SPEED_PREFIX}{name}": round(value, 4) for name, value in logs.items()}

    def _exclude_first(self) -> Mapping[str, float]:
        later = {name: value - self._first[name] for name, value in self._total.items()}
        return later if later["steps"] else self._total

    def _advise(self) -> None:
        if self._advice is None and self._args.process_index == 0:
            self._advice = suggest_speedup(self._compute_throughput(self._exclude_first()))
            if self._advice is not None:
                logger.warning("%s.", self._advice)

    def _estimate_remaining_seconds(self, state: TrainerState, control: TrainerControl) -> float:
        """Extrapolate the mean times of steps, evaluations and saves."""
        args, totals = self._args, self._exclude_first()
        remaining = totals["training"] / max(totals["steps"], 1) * (state.max_steps - state.global_step)
        for part, strategy, steps, minutes, is_next in (
            ("evaluation", args.eval_strategy, state.eval_steps, args.eval_minutes, control.should_evaluate),
            ("save", args.save_strategy, state.save_steps, args.save_minutes, control.should_save),
        ):
            number = float(is_next) + (remaining / (60 * minutes) if minutes else 0)
            if strategy == "steps" and steps:
                begin = max(state.global_step, math.ceil(args.eval_delay) - 1 if part == "evaluation" else 0)
                number += math.ceil(state.max_steps / steps) - begin // steps if begin < state.max_steps else 0
            elif strategy == "epoch":
                # The evaluation after an epoch's last step is due before its flag is raised.
                number = max(state.num_train_epochs - math.ceil(state.epoch or 0) + 1, number)
            remaining += number * self._total[part] / max(self._times[part], 1)
        if args.max_minutes is not None:
            remaining = min(remaining, max(60 * args.max_minutes - sum(self._total[part] for part in TIME_PARTS), 0.0))
        return remaining
