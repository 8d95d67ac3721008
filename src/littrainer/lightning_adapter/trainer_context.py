"""The Trainer, as the Lightning adapter uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.handler import CallbackHandler
    from littrainer.callbacks.state import TrainerControl, TrainerState


class TrainerContext(Protocol):
    args: TrainingArguments
    model: Any
    model_wrapped: Any
    optimizer: Any
    accelerator: Any
    session: Any
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    lightning_callbacks: list[Any]
    lightning_keywords: dict[str, Any]
    lightning_module: Any
    deferred_validation_end: Any
    is_in_train: bool
    is_fsdp_enabled: bool

    def overrides_training_step(self) -> bool: ...
