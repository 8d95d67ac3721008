"""Losses of a module, divided by the label tokens of a window whose optimizer step Lightning decides on.

Where the window is known before its first forward pass, each loss is divided by its tokens. Where Lightning accumulates
over any other loader, it is not: each loss is divided by a reference, the same in all processes and windows, and before
the optimizer steps the gradients are multiplied by reference / tokens. This is exact, up to rounding, for losses that
are divided as a whole, or not at all; gradients cannot be taken apart, so of one that is divided in part all is scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.overrides import TorchFunctionMode

from littrainer.data.windows import MicroBatch, count_label_tokens
from littrainer.distributed.collectives import reduced
from littrainer.errors.notes import kind_of
from littrainer.model.facts import facts_about
from littrainer.training import loss
from littrainer.training.loss import smoother_for

Number = torch.Tensor | int | None


def model_inputs(batch: Any) -> dict[str, Any]:
    """The entries of a batch.

    Raises:
        TypeError: the batch is no mapping.
    """
    if not isinstance(batch, Mapping):
        raise no_inputs(kind_of(batch))
    return dict(batch)


def no_inputs(what: str) -> TypeError:
    """The error for something that a model cannot be called with, described in words."""
    return TypeError(
        f"TransformersModule was handed {what} as a batch, and calls its model with the batch's entries "
        "as keywords: let the loader give dicts such as {'input_ids': ..., 'labels': ...}, for instance with "
        "DataLoader(..., collate_fn=littrainer.default_data_collator), or make it such a dict in the module's "
        "on_after_batch_transfer."
    )


@dataclass
class ModuleLossSettings:
    """The `training.loss.LossSettings` of a module.

    Parameters:
        args: how processes share tokens: `world_size` and `average_tokens_across_devices`.
        forward_arguments: names of what the model's forward takes.
        can_return_loss: it returns a loss without labels too.
        current_gradient_accumulation_steps: micro-batches in the window at hand.
        tensor_parallel_size: processes that compute each layer together.
    """

    args: Any
    compute_loss_func: Callable[..., Any] | None
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    label_names: list[str]
    forward_arguments: tuple[str, ...]
    can_return_loss: bool
    _loss_shifts_labels: bool
    loss_is_scaled_for_ga: bool | None = None
    current_gradient_accumulation_steps: int = 1
    tensor_parallel_size: int = 1

    def get_tp_size(self) -> int:
        """Processes that compute each layer together."""
        return self.tensor_parallel_size

    @property
    def shifts_labels(self) -> bool:
        """Whether the loss compares each label with the prediction one position before."""
        return self._loss_shifts_labels


def loss_settings_of(model: nn.Module, args: Any, compute_loss_func: Callable[..., Any] | None) -> ModuleLossSettings:
    """The loss settings of a model in one process, as training arguments have them."""
    facts = facts_about(model)
    return ModuleLossSettings(
        args=SimpleNamespace(world_size=1, average_tokens_across_devices=args.average_tokens_across_devices),
        compute_loss_func=compute_loss_func,
        label_smoother=smoother_for(model, args.label_smoothing_factor),
        model_accepts_loss_kwargs=facts.accepts_loss_kwargs,
        label_names=facts.label_names if args.label_names is None else args.label_names,
        forward_arguments=facts.forward_arguments,
        can_return_loss=facts.can_return_loss,
        _loss_shifts_labels=facts.shifts_labels,
    )


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
        self._loss: torch.Tensor | None = None
        self._loss_factor: torch.Tensor | float | None = None
        self._micro_batches = 0
        self._is_counted: bool | None = None
        # Whether the loss is divided by the number that it is given; None until a forward pass has been watched.
        self._is_divided: bool | None = None
        # Of the micro-batch at hand: the settings of its loss, and micro-batches in a full window if it closes one of
        # which the tokens were not known before.
        self._settings: ModuleLossSettings | None = None
        self._closes: int | None = None

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
    ) -> tuple[dict[str, Any], Number]:
        """Take in a micro-batch, before its forward pass.

        Parameters:
            batch: a mapping.
            known: the batch's place in its window, if the window's items were counted before.
            accumulation: micro-batches in a full window.
            steps: whether the optimizer steps after this one.
            place: number of the batch in its epoch, from 0.

        Returns:
            the inputs, and what the sum of their losses is to be divided by; None where losses are means.

        Raises:
            TypeError: the batch is no mapping.
            ValueError: its window ends elsewhere than Lightning's, or its tokens are known too late for its loss.
        """
        if place % accumulation == 0:
            self._micro_batches, self._loss, self._tokens, self._is_counted = 0, None, 0, None
        self._micro_batches += 1
        self.gradient_factor = self._loss_factor = self._closes = None
        self._settings = settings
        inputs = model_inputs(batch)
        if known is not None:
            _check_place(known, steps, place)
            settings.current_gradient_accumulation_steps = known.window_size
            return inputs, known.num_items_in_window
        settings.current_gradient_accumulation_steps = accumulation
        if accumulation == 1:
            return inputs, loss.items_in_window(settings, [inputs], device)
        self._closes = accumulation if steps else None
        return inputs, self._count(settings, inputs, device, accumulation)

    def watch(self, number: Number, is_compiled: bool = False) -> AbstractContextManager[Any]:
        """A context for a forward pass, which finds out whether the loss is divided by the number that it is given.

        That of a training's first one with accumulation warns of a loss that is not, and so grows with the window.

        Parameters:
            is_compiled: torch compiles the model once more to be watched, which is done only if gradients depend on it.
        """
        assert self._settings is not None
        is_needed = self._settings.current_gradient_accumulation_steps > 1 and self._is_divided is None
        if number is None or not is_needed or (is_compiled and number is not self._reference):
            return nullcontext()
        return _Watch(self, number, self._settings)

    def note_whether_divided(self, is_divided: bool) -> None:
        """Note what was seen in a forward pass."""
        self._is_divided = is_divided

    def add(self, value: torch.Tensor) -> None:
        """Note the loss of the micro-batch at hand, as it goes into the backward pass."""
        self.has_divided_the_loss = True
        value = value.detach()
        self._loss = value if self._loss is None else self._loss + value
        if self._closes is not None:
            self._set_factors(self._closes)

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
        if self._reference is None:
            # Once in a training all processes settle on a number; any number will do.
            number: Any = loss.items_in_window(settings, [inputs], device)
            self._reference = number.clamp(min=1) * accumulation
        return self._reference

    def _set_factors(self, accumulation: int) -> None:
        if not self._is_counted:
            # Losses that are means were divided by a full window.
            if self._micro_batches < accumulation:
                self.gradient_factor = self._loss_factor = accumulation / self._micro_batches
            return
        if self._is_divided is False:
            # What a Trainer makes of a loss that takes the number and leaves it aside: the sum over the window.
            return
        tokens, settings = self._tokens, self._settings
        assert self._reference is not None and settings is not None
        if loss.averages_over_processes(settings):
            tokens = reduced(tokens) / settings.get_tp_size()
        # A window without a label has no loss, as 0 / 0, and gradients of 0.
        factor = self._reference / tokens
        self._loss_factor, self.gradient_factor = factor, torch.where(factor.isinf(), 1.0, factor)


class _Watch(TorchFunctionMode):
    """Sees whether any operation takes the number that the loss is to be divided by, and warns if none does.

    Many models take any keyword and return the mean whatever it says.
    """

    def __init__(self, window: WindowNormalisation, number: Any, settings: ModuleLossSettings):
        super().__init__()
        self.window, self.number, self.settings, self.is_used = window, number, settings, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_used = self.is_used or any(one is self.number for one in (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        if kind is not None:
            return
        self.window.note_whether_divided(self.is_used)
        if not self.is_used:
            by_function = self.settings.compute_loss_func is not None
            size = self.settings.current_gradient_accumulation_steps
            rank_zero_warn(
                "The loss is not divided by num_items_in_batch, so that of an optimizer step is the sum over its "
                f"{size} micro-batches, as with a Trainer: about {size} times its mean. To train with the mean, "
                f"{'divide by it' if by_function else 'set model.accepts_loss_kwargs = False'}."
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
