"""Losses divided by the label tokens of a window whose optimizer step Lightning decides on.

Where the window is known before its first forward pass, each loss is divided by its tokens. Where Lightning accumulates
over anybody's loader, it is not: each loss is divided by a reference, the same in all processes and windows, and before
the optimizer steps the gradients are multiplied by reference / tokens. This is exact, up to rounding, for losses that
are divided as a whole, or not at all; gradients cannot be taken apart, so one that is divided in part is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.overrides import TorchFunctionMode

from littrainer.checkpoint.random_state import capture_random_states, set_random_states
from littrainer.data.windows import MicroBatch, count_label_tokens
from littrainer.plain_lightning.loss_settings import ModuleLossSettings
from littrainer.plain_lightning.model_inputs import model_inputs
from littrainer.processes.agreement import largest
from littrainer.processes.collectives import reduced
from littrainer.training import loss

Number = torch.Tensor | int | None
# A power of two, so that what is divided by it is exact; what remains is the part that is not divided.
LARGE = 2.0**20
# Shares of the whole loss: the least part that is told from none, and what kernels that add in any order may differ by.
NO_PART = 1e-5
NO_DIFFERENCE = 1e-3


class Divided(IntEnum):
    """How much of a loss is divided by a number; of what processes find, the largest counts."""

    # The loss was 0 or no number.
    UNKNOWN = 0
    NOT_AT_ALL = 1
    WHOLLY = 2
    PARTLY = 3


class WindowNormalisation:
    """The window of the optimizer step at hand: its losses, and what they are divided by."""

    def __init__(self) -> None:
        # Whether the loss that is to be differentiated next has been divided here, whatever Lightning divides it by.
        self.has_divided_the_loss = False
        # What gradients are to be multiplied by before the optimizer steps; None leaves them as they are.
        self.gradient_factor: torch.Tensor | float | None = None
        self._reference: torch.Tensor | None = None
        # A training may resume in the middle of a window, whose remaining micro-batches then count for themselves.
        self._tokens: Any = 0
        self._has_labels = False
        self._loss: torch.Tensor | None = None
        self._loss_factor: torch.Tensor | float | None = None
        self._micro_batches = 0
        self._is_counted: bool | None = None
        self._divided = Divided.UNKNOWN
        self._has_watched = False

    def enter(
        self,
        settings: ModuleLossSettings,
        batch: Any,
        known: MicroBatch | None = None,
        accumulation: int = 1,
        *,
        steps: bool,
        device: torch.device,
        place: int = 0,
        try_loss: Callable[[dict[str, Any], torch.Tensor, bool], Divided] = lambda *_: Divided.WHOLLY,
    ) -> tuple[dict[str, Any], Number]:
        """Take in a micro-batch, before its forward pass.

        Parameters:
            batch: a mapping.
            known: the batch's place in its window, if the window's items were counted before.
            accumulation: micro-batches in a full window.
            steps: whether the optimizer steps after this one.
            place: number of the batch in its epoch, from 0.
            try_loss: tells how much of the loss of inputs is divided by a number, given also whether this process's
                inputs have labels that count; asked until it is known, of a training's first micro-batch as a rule.

        Returns:
            the inputs, and what the sum of their losses is to be divided by; None where losses are means.

        Raises:
            TypeError: the batch is no mapping.
            ValueError: its window ends elsewhere than Lightning's, or its tokens are known too late for its loss.
        """
        if place % accumulation == 0:
            self._micro_batches, self._loss, self._tokens, self._is_counted = 0, None, 0, None
        self._micro_batches += 1
        self.gradient_factor = self._loss_factor = None
        inputs = model_inputs(batch)
        if known is not None:
            _check_place(known, steps, place)
            settings.current_gradient_accumulation_steps = known.window_size
            return inputs, known.num_items_in_window
        settings.current_gradient_accumulation_steps = accumulation
        if accumulation == 1:
            return inputs, loss.items_in_window(settings, [inputs], device)
        number = self._count(settings, inputs, device, accumulation)
        if isinstance(number, torch.Tensor) and self._divided is Divided.UNKNOWN:
            self._divided = try_loss(inputs, number, self._has_labels)
            if self._divided is Divided.PARTLY:
                raise ValueError(_divided_in_part(settings, accumulation))
        if steps:
            self._set_factors(settings, accumulation)
        return inputs, number

    def watch(self, number: Number, settings: ModuleLossSettings) -> AbstractContextManager[Any]:
        """A context for a forward pass; that of a training's first one warns of a loss that grows with the window."""
        size, has_watched = settings.current_gradient_accumulation_steps, self._has_watched
        self._has_watched = has_watched or size > 1
        return nullcontext() if has_watched or size == 1 or number is None else _WarnsIfUnused(number, size, settings)

    def add(self, value: torch.Tensor) -> None:
        """Note the loss of the micro-batch at hand, as it goes into the backward pass."""
        self.has_divided_the_loss = True
        value = value.detach()
        self._loss = value if self._loss is None else self._loss + value

    @property
    def loss(self) -> torch.Tensor:
        """The loss of the window so far, on the device."""
        assert self._loss is not None
        return self._loss if self._loss_factor is None else self._loss * self._loss_factor

    def scale_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Multiply gradients by what the reference has to be replaced with, where the window has closed."""
        self.has_divided_the_loss = False
        factor, self.gradient_factor = self.gradient_factor, None
        if factor is None:
            return
        gradients: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                own: Any = parameter.grad
                own = own.to_local() if hasattr(own, "to_local") else own
                gradients.setdefault(own.device, []).append(own)
        with torch.no_grad():
            for device, group in gradients.items():
                by = factor.to(device) if isinstance(factor, torch.Tensor) else factor
                torch._foreach_mul_(group, by)

    def _count(
        self, settings: ModuleLossSettings, inputs: dict[str, Any], device: torch.device, accumulation: int
    ) -> Number:
        takes_number = settings.model_accepts_loss_kwargs or settings.compute_loss_func is not None
        is_countable = takes_number and "labels" in inputs
        tokens: Any = count_label_tokens([inputs], settings.shifts_labels) if is_countable else None
        is_counted = isinstance(tokens, torch.Tensor)
        if self._is_counted not in (None, is_counted):
            raise ValueError(
                "Some micro-batches of an optimizer step have labels that can be counted, and others have not: their "
                "losses cannot be averaged over the step. Give all of them the same kind of labels, or set "
                "accumulate_grad_batches=1."
            )
        self._is_counted = is_counted
        if not is_counted:
            return None
        if settings.args.world_size > 1 and not settings.args.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices=False divides the losses of each process by its own label tokens, and "
                "with accumulate_grad_batches above 1 they are known only when its gradients have been averaged. Use "
                "TrainerDataModule, which counts them before, or leave average_tokens_across_devices on."
            )
        self._tokens = self._tokens + tokens
        if self._divided is Divided.UNKNOWN:
            self._has_labels = bool(tokens > 0)
        if self._reference is None:
            # Once in a training all processes settle on a number; any number will do.
            number: Any = loss.items_in_window(settings, [inputs], device)
            self._reference = number.clamp(min=1) * accumulation
        return self._reference

    def _set_factors(self, settings: ModuleLossSettings, accumulation: int) -> None:
        if not self._is_counted:
            # Losses that are means were divided by a full window.
            if self._micro_batches < accumulation:
                self.gradient_factor = self._loss_factor = accumulation / self._micro_batches
            return
        if self._divided is Divided.NOT_AT_ALL:
            # What a Trainer makes of a loss that takes the number and leaves it aside: the sum over the window.
            return
        tokens: Any = self._tokens
        if loss.averages_over_processes(settings):
            tokens = reduced(tokens) / settings.get_tp_size()
        assert self._reference is not None
        # A window without a label has no loss, as 0 / 0, and gradients of 0.
        factor = self._reference / tokens
        self._loss_factor, self.gradient_factor = factor, torch.where(factor.isinf(), 1.0, factor)


class _WarnsIfUnused(TorchFunctionMode):
    """Warns at its end if no operation has taken the number that the loss is to be divided by."""

    def __init__(self, number: Any, size: int, settings: ModuleLossSettings):
        super().__init__()
        self.number, self.size, self.settings, self.is_used = number, size, settings, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_used = self.is_used or any(one is self.number for one in (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        if kind is None and not self.is_used:
            by_function = self.settings.compute_loss_func is not None
            rank_zero_warn(
                "The loss is not divided by num_items_in_batch, so that of an optimizer step is the sum over its "
                f"{self.size} micro-batches, as with a Trainer: about {self.size} times its mean. To train with the "
                f"mean, {'divide by it' if by_function else 'set model.accepts_loss_kwargs = False'}."
            )


def _divided_in_part(settings: ModuleLossSettings, accumulation: int) -> str:
    as_means = "" if settings.compute_loss_func is not None else "set `accepts_loss_kwargs = False` on the model, "
    return (
        "A part of the loss is divided by the label tokens of the optimizer step, and another part is not, such as a "
        f"regulariser or an auxiliary loss. With accumulate_grad_batches={accumulation} over a loader that does not "
        "hand out whole windows, the tokens are known only when the gradients of both parts have been added. Use "
        f"TrainerDataModule, which counts them before; or {as_means}divide all parts by num_items_in_window in an "
        "override of compute_loss, or set accumulate_grad_batches=1."
    )


def _check_place(known: MicroBatch, steps: bool, place: int) -> None:
    # A stream may end in the middle of a window, and then Lightning steps with what there is.
    if steps == known.closes_window or (steps and known.is_last_drawn):
        return
    raise ValueError(
        f"Batch {place} of the epoch {'ends' if steps else 'does not end'} an optimizer step of lightning.Trainer, and "
        f"its window of {known.window_size} micro-batches goes {'on' if steps else 'no further'}. Leave "
        "accumulate_grad_batches as it is within an epoch, or use TrainerDataModule(windows=False)."
    )


def part_divided(
    loss_for: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, number: torch.Tensor, has_labels: bool = True
) -> Divided:
    """How much of a loss is divided by the number that it is given; all processes ask.

    Many models take any keyword and return the mean whatever it says. Two forward passes show it, in the mode that the
    module is in, since a part of the loss may be there in training only.

    Parameters:
        loss_for: the loss for a number.
        module: the LightningModule, or a model.
        number: one to try.
        has_labels: whether this process's batch has labels that count; if it does not, its loss says nothing.
    """
    with torch.no_grad(), _unchanged(module), warnings.catch_warnings():
        # Those of the forward pass are shown when it is made in earnest.
        warnings.simplefilter("ignore")
        states = capture_random_states()
        losses = []
        for factor in (1.0, LARGE):
            set_random_states(states)
            losses.append(loss_for(number * factor).detach().float().sum())
        set_random_states(states)
    return Divided(largest(_judged(losses[0].item(), losses[1].item()) if has_labels else Divided.UNKNOWN))


def _judged(loss: float, remainder: float) -> Divided:
    # Also for what is no number every comparison is false.
    if not 0 < abs(loss) < float("inf"):
        return Divided.UNKNOWN
    share = remainder / loss
    if abs(share) < NO_PART:
        return Divided.WHOLLY
    return Divided.NOT_AT_ALL if abs(share - 1) < NO_DIFFERENCE else Divided.PARTLY


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Keep buffers as they are, and log nothing."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    # On the object it comes before the class's method, which `log_dict` calls too.
    module.__dict__["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del module.__dict__["log"]
        for buffer, value in buffers:
            buffer.copy_(value)
