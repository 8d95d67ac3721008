"""Losses divided by the label tokens of a window whose optimizer step Lightning decides on.

Where the window is known before its first forward pass, each loss is divided by its tokens. Where Lightning accumulates
over anybody's loader, it is not: each loss is divided by a reference, the same in all processes and windows, and before
the optimizer steps the gradients are multiplied by reference / tokens, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from littrainer.data.windows import MicroBatch, count_label_tokens
from littrainer.error_notes import kind_of
from littrainer.plain_lightning.loss_settings import ModuleLossSettings
from littrainer.processes.agreement import agreed
from littrainer.processes.collectives import reduced
from littrainer.training import loss

Number = torch.Tensor | int | None


class WindowNormalisation:
    """The window of the optimizer step at hand: its losses, and what they are divided by."""

    def __init__(self) -> None:
        self.closes = True
        # What gradients are to be multiplied by before the optimizer steps; None leaves them as they are.
        self.gradient_factor: torch.Tensor | float | None = None
        self._reference: torch.Tensor | None = None
        self._tokens: Any = None
        self._loss: torch.Tensor | None = None
        self._micro_batches = 0
        self._is_counted: bool | None = None
        self._divides: bool | None = None

    def enter(
        self,
        settings: ModuleLossSettings,
        batch: Any,
        *,
        accumulation: int,
        steps: bool,
        device: torch.device,
        place: int = 0,
        divides: Callable[[dict[str, Any], torch.Tensor], bool] = lambda inputs, number: True,
    ) -> tuple[dict[str, Any], Number]:
        """Take in a micro-batch, before its forward pass.

        Parameters:
            batch: a mapping, or a `MicroBatch`, whose window is known.
            accumulation: micro-batches in a full window.
            steps: whether the optimizer steps after this one.
            place: number of the batch in its epoch, from 0.
            divides: tells whether the loss of inputs is divided by a number; asked once in a training.

        Returns:
            the inputs, and what the sum of their losses is to be divided by; None where losses are means.

        Raises:
            TypeError: the batch is no mapping.
            ValueError: its window ends elsewhere than Lightning's, or its tokens cannot be counted in time.
        """
        if place % accumulation == 0:
            self._micro_batches, self._loss, self._tokens, self._is_counted = 0, None, 0, None
        self._micro_batches += 1
        self.closes, self.gradient_factor = steps, None
        if isinstance(batch, MicroBatch):
            _check_place(batch, steps, place)
            settings.current_gradient_accumulation_steps = batch.window_size
            return _inputs(batch.inputs), batch.num_items_in_window
        inputs = _inputs(batch)
        settings.current_gradient_accumulation_steps = accumulation
        if accumulation == 1:
            return inputs, loss.items_in_window(settings, [inputs], device)
        number = self._count(settings, inputs, device, accumulation)
        if isinstance(number, torch.Tensor) and self._divides is None:
            self._divides = agreed(divides(inputs, number))
        if steps:
            self.gradient_factor = self._factor(settings, accumulation)
        return inputs, number

    def add(self, value: torch.Tensor) -> None:
        """Note the loss of the micro-batch at hand, as it goes into the backward pass."""
        value = value.detach()
        self._loss = value if self._loss is None else self._loss + value

    @property
    def loss(self) -> torch.Tensor:
        """The loss of the window so far, on the device."""
        assert self._loss is not None
        return self._loss if self.gradient_factor is None else self._loss * self.gradient_factor

    def scale_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Multiply gradients by what the reference has to be replaced with, where the window has closed."""
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
        takes_number = settings.takes_number_of_items and "labels" in inputs
        tokens = count_label_tokens([inputs], settings.shifts_labels) if takes_number else None
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

    def _factor(self, settings: ModuleLossSettings, accumulation: int) -> torch.Tensor | float | None:
        if self._is_counted and not self._divides:
            # What a Trainer makes of a loss that takes the number and leaves it aside: the sum over the window.
            return None
        if not self._is_counted:
            # Losses that are means were divided by a full window.
            return None if self._micro_batches == accumulation else accumulation / self._micro_batches
        tokens: Any = self._tokens
        if loss.averages_over_processes(settings):
            tokens = reduced(tokens) / settings.get_tp_size()
        assert self._reference is not None
        return self._reference / tokens


def divides_by(loss_for: Callable[[Any], torch.Tensor], model: nn.Module, number: torch.Tensor) -> bool:
    """Whether a loss is divided by the number that it is given, and does not just take it.

    Many models take any keyword and return the mean whatever it says. Two forward passes tell; they leave the model's
    buffers and the random generators as they are.

    Parameters:
        loss_for: the loss for a number.
        number: one to try.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            single, double = (loss_for(number * factor).detach().float().sum() for factor in (1, 2))
    finally:
        for module, was_training in modes:
            module.training = was_training
    # Divided it is half as large, unless a part of it is not divided; where it is 0 or no number, nothing tells.
    return not bool(((single - double).abs() < 0.25 * single.abs()).item())


def _inputs(batch: Any) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"TransformersModule was handed {kind_of(batch)} as a batch, and calls its model with the batch's entries "
            "as keywords: let the loader give dicts such as {'input_ids': ..., 'labels': ...}, for instance with "
            "DataLoader(..., collate_fn=littrainer.default_data_collator), or override compute_loss and "
            "prediction_outputs."
        )
    return dict(batch)


def _check_place(batch: MicroBatch, steps: bool, place: int) -> None:
    # A stream may end in the middle of a window, and then Lightning steps with what there is.
    if steps == batch.closes_window or (steps and batch.is_last_drawn):
        return
    raise ValueError(
        f"Batch {place} of the epoch {'ends' if steps else 'does not end'} an optimizer step of lightning.Trainer, and "
        f"its window of {batch.window_size} micro-batches goes {'on' if steps else 'no further'}. Leave "
        "accumulate_grad_batches as it is within an epoch, or use TrainerDataModule(windows=False)."
    )
