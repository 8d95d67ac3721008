"""The Trainer, as the packages below it use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.handler import CallbackHandler
    from littrainer.callbacks.state import TrainerControl, TrainerState


class TrainerContext:
    """The typed attributes and methods by which all packages use a Trainer, whose base class this is."""

    # ---- Parameters of the Trainer
    args: TrainingArguments
    model: Any
    model_init: Callable[..., nn.Module] | None
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    data_collator: Callable[[list[Any]], Any]
    compute_loss_func: Callable[..., torch.Tensor] | None
    compute_metrics: Any
    neftune_noise_alpha: float | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None
    lightning_keywords: dict[str, Any]

    # ---- Objects made by the Trainer
    session: Any
    # The model with the strategy's wrappers.
    model_wrapped: Any
    accelerator: Any
    callback_handler: CallbackHandler
    lightning_callbacks: list[Any]
    state: TrainerState
    control: TrainerControl
    gather_function: Callable[..., Any]
    create_model_card: Callable[..., None]

    # ---- Attributes of its session
    optimizer: Any
    lr_scheduler: Any
    lightning_module: Any
    deepspeed: Any
    is_in_train: bool
    hp_space: Any
    hp_name: Any
    hp_search_backend: Any
    hub_model_id: str | None

    # ---- Facts of the arguments and the model
    is_deepspeed_enabled: bool = False
    is_fsdp_enabled: bool = False
    is_model_parallel: bool
    place_model_on_device: bool
    # True if `compute_loss` divides by the window; None: it does if the model received `num_items_in_batch`.
    loss_is_scaled_for_ga: bool | None = None
    # Seconds until the model was wrapped for evaluation.
    model_preparation_time: float | None = None
    label_names: list[str]

    if TYPE_CHECKING:

        def create_accelerator_and_postprocess(self) -> None: ...
        def call_model_init(self, trial: Any = None) -> nn.Module: ...
        def add_callback(self, callback: Any) -> None: ...
        def remove_callback(self, callback: Any) -> None: ...
        def is_local_process_zero(self) -> bool: ...
        def is_world_process_zero(self) -> bool: ...
        def get_tp_size(self) -> int: ...
        def _get_batch_copies(self) -> int: ...
        def overrides_training_step(self) -> bool: ...
        def get_train_dataloader(self) -> Any: ...
        def get_total_train_batch_size(self, args: TrainingArguments) -> int: ...
        def set_initial_training_values(
            self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int | None = None
        ) -> tuple[int, int, int, float, int, int, int]: ...
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None: ...
        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer: ...
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any: ...
        def apply_changed_arguments(self, changed: set[str], makes_accelerator: bool = True) -> None: ...
        def release_training_memory(self) -> None: ...
        def _get_output_dir(self, trial: Any) -> str: ...
        def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None) -> Any: ...
        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any: ...
        def compute_loss_context_manager(self) -> AbstractContextManager[Any]: ...
        def evaluate(
            self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
        ) -> dict[str, float]: ...
        def prediction_step(
            self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Sequence[str] | None = None
        ) -> tuple[Any, Any, Any]: ...
        def num_examples(self, dataloader: Any) -> int: ...
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None: ...
        def store_flos(self) -> None: ...
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...
        def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None: ...
