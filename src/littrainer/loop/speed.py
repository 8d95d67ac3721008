"""Where the time of a training goes (`log_speed`): parts of each logging interval, rates, and when it will end."""

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

# Of a GPU, that wait to be looked at.
MAX_EVENTS = 4096
# Word in a GPU's name -> its most operations a second on dense matrices, by its data sheet: 16 bits, TF32, float32.
PEAKS: dict[str, tuple[float, float, float]] = {
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


def peak_of(device: torch.device, is_half: bool) -> float | None:
    """Return the most operations a second that a device can do, in 16 bits or not; None if that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    kind = 0 if is_half else 1 if get_matmul_precision() in ("high", "medium", "tf32") else 2
    return next((peaks[kind] for part, peaks in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)


class NoSpeedLog:
    """Stands for a `SpeedLog` without `log_speed`; builtins, which a step calls, cost it no Python call."""

    begin = enter = count = staticmethod(id)
    during = staticmethod(nullcontext)
    logs = summary = staticmethod(lambda *_: {})


class SpeedLog:
    """Counts where the time of one training goes.

    `enter` is called at each boundary; what is between two calls belongs to the part that the first one named. On a GPU
    the boundaries are events in its stream, which are looked at when something is logged, so that a part has the time
    that the GPU took for it or waited in it. Nothing is read from the device before.

    Parameters:
        args: training arguments.
        model: says which input has the tokens, and in which numbers it computes.
        padding_id: the token that fills rows up, if a batch has no attention mask; None if it is not known.
        copies: neighbouring processes that share their samples, as under tensor parallelism.
    """

    def __init__(self, args: TrainingArguments, model: Any, padding_id: int | None, copies: int):
        self._args, self._padding_id, self._copies = args, padding_id, copies
        self._main_input = getattr(model, "main_input_name", "input_ids")
        self._on_gpu = args.device.type == "cuda"
        # Asked for at each event it would cost several calls.
        self._stream = torch.cuda.current_stream(args.device) if self._on_gpu else None
        is_half = args.bf16 or args.fp16 or getattr(model, "dtype", torch.float32) is not torch.float32
        self._peak = peak_of(args.device, is_half)
        self._part, self._since = "other", 0.0
        self._seconds = dict.fromkeys(TIME_PARTS, 0.0)
        self._times: Counter[str] = Counter()
        self._events: list[tuple[str, Any]] = []
        self._idle_events: list[Any] = []
        self._samples = self._tokens = 0
        # Those that are no padding.
        self._real_tokens: torch.Tensor | None = None
        # Of several processes, the largest share of the interval in which one has waited for data.
        self._slowest: float | None = None
        # Of all intervals, and of the first one, in which workers start and kernels are chosen.
        self._whole: Counter[str] = Counter()
        self._first: Counter[str] = Counter()
        self._flops_before, self._steps_before = 0.0, 0
        self._advice: str | None = None

    def begin(self, state: TrainerState) -> None:
        """Count from here."""
        self._flops_before, self._steps_before = state.total_flos, state.global_step
        self._since = perf_counter()
        self.enter("other")

    def enter(self, part: str) -> None:
        """What follows belongs to a part of `TIME_PARTS`."""
        if self._on_gpu:
            if not self._idle_events:
                self._settle()
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
        """What is within belongs to a part, and what follows to the one before it."""
        before = self._part
        if before != part:
            self.enter(part)
        try:
            yield
        finally:
            if before != part:
                self.enter(before)

    def _settle(self) -> None:
        """Add up what lies between events that the GPU has come to; the newest of them remains."""
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
        """Count samples and tokens of micro-batches, without reading them."""
        for inputs in window:
            # The mapping within a BatchEncoding, whose methods take several calls.
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
        """Return what is logged of the time since the last log; all processes call this together.

        Parameters:
            state: with the operations of all processes up to this step.
            control: says which evaluation and which save come next.
        """
        found = self._interval(state)
        self._whole.update(found)
        if self._first:
            self._advise()
        else:
            self._first.update(found)
        logs = self._described(found)
        if self._slowest is not None:
            logs[f"{SPEED_PREFIX}slowest_data_share"] = round(self._slowest, 4)
        logs[f"{SPEED_PREFIX}seconds_left"] = round(self._seconds_left(state, control), 1)
        return logs

    def summary(self, state: TrainerState) -> dict[str, float]:
        """Return the same of the whole training, which ends here, and give advice if that was not done."""
        self._whole.update(self._interval(state))
        self._advise()
        return self._described(self._whole)

    def _interval(self, state: TrainerState) -> dict[str, float]:
        """What there is to count since the last call, of all processes but for the times of the parts."""
        self.enter(self._part)
        if self._on_gpu:
            self._events[-1][1].synchronize()
            self._settle()
        seconds, self._seconds = self._seconds, dict.fromkeys(TIME_PARTS, 0.0)
        own = [self._samples, self._tokens, 0, seconds["data"] / (sum(seconds.values()) or 1.0)]
        self._samples = self._tokens = 0
        kind = torch.float32 if self._args.device.type == "mps" else torch.float64
        row = torch.tensor([own], dtype=kind, device=self._args.device)
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

    def _described(self, of: Mapping[str, float]) -> dict[str, float]:
        training = of["training"] or math.inf
        logs = {f"{part}_seconds": of[part] for part in TIME_PARTS}
        logs["samples_per_second"] = of["samples"] / training
        if of["tokens"]:
            logs["tokens_per_second"] = of["tokens"] / training
        if self._real_tokens is not None and of["tokens"]:
            logs["padding_share"] = 1 - of["real_tokens"] / of["tokens"]
        if self._peak is not None and of["flops"]:
            logs["flops_utilization"] = of["flops"] / training / self._peak / self._args.world_size
        return {f"{SPEED_PREFIX}{name}": round(value, 4) for name, value in logs.items()}

    def _without_first(self) -> Mapping[str, float]:
        later = {name: value - self._first[name] for name, value in self._whole.items()}
        return later if later["steps"] else self._whole

    def _advise(self) -> None:
        if self._advice is None and self._args.process_index == 0:
            self._advice = suggest_speedup(self._described(self._without_first()))
            if self._advice is not None:
                logger.warning("%s.", self._advice)

    def _seconds_left(self, state: TrainerState, control: TrainerControl) -> float:
        """The steps that are left at their mean pace, and the evaluations and saves among them at theirs."""
        args, of = self._args, self._without_first()
        left = of["training"] / max(of["steps"], 1) * (state.max_steps - state.global_step)
        for part, strategy, steps, minutes, is_next in (
            ("evaluation", args.eval_strategy, state.eval_steps, args.eval_minutes, control.should_evaluate),
            ("save", args.save_strategy, state.save_steps, args.save_minutes, control.should_save),
        ):
            number = float(is_next) + (left / (60 * minutes) if minutes else 0)
            if strategy == "steps" and steps:
                begin = max(state.global_step, math.ceil(args.eval_delay) - 1 if part == "evaluation" else 0)
                number += math.ceil(state.max_steps / steps) - begin // steps if begin < state.max_steps else 0
            elif strategy == "epoch":
                # That of an epoch whose last step is done is to come, whether or not the control says so already.
                number = max(state.num_train_epochs - math.ceil(state.epoch or 0) + 1, number)
            left += number * self._whole[part] / max(self._times[part], 1)
        if args.max_minutes is not None:
            left = min(left, max(60 * args.max_minutes - sum(self._whole[part] for part in TIME_PARTS), 0.0))
        return left
