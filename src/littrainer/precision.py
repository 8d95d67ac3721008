"""The precision plugins that Lightning needs for a Trainer's mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from littrainer.arguments.destinations import FULL_PRECISION

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


class ForwardMixedPrecision(MixedPrecision):
    """Lightning's mixed precision for a model whose forward enters autocast by itself.

    Lightning would run the whole step under autocast, loss and metrics included, where a Trainer runs the model alone.
    Gradients are unscaled before they are clipped, with any optimizer.
    """

    def __init__(self, precision: Any, device: str, scaler: torch.amp.GradScaler | None = None):
        super().__init__(precision, device, scaler)
        self.step_was_skipped = False
        self._is_unscaled = False

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Nothing to enter: the model does so."""
        yield

    def unscale(self, optimizer: Any) -> None:
        """Divide the scale out of the gradients, once for each optimizer step."""
        if self.scaler is not None and not self._is_unscaled:
            self.scaler.unscale_(optimizer)
            self._is_unscaled = True

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Backward pass and clipping, then a step, unless the scaler finds gradients that are not finite."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        closure()
        self.unscale(optimizer)
        self._after_closure(model, optimizer)
        self.step_was_skipped = True
        handle = optimizer.register_step_pre_hook(self._note_step)
        try:
            result = self.scaler.step(optimizer, **kwargs)
        finally:
            handle.remove()
        self.scaler.update()
        self._is_unscaled = False
        return result

    def _note_step(self, *_: Any) -> None:
        self.step_was_skipped = False


def mixed_precision_plugin(precision: Any, trainer: Trainer) -> ForwardMixedPrecision | None:
    """The plugin for one of Lightning's precisions; None where nothing is mixed.

    The gradient scaler is the Trainer's, since its scale outlives a training.
    """
    if precision == FULL_PRECISION:
        return None
    return ForwardMixedPrecision(precision, trainer.args.device.type, trainer.accelerator.scaler)
