"""TrainingArguments and Seq2SeqTrainingArguments."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.deepspeed import set_up_deepspeed
from littrainer.arguments.earlier_names import AcceptsEarlierNames, apply_fields_with_earlier_names
from littrainer.arguments.fields import GenerationFields
from littrainer.arguments.grouped_setters import GroupedSetters
from littrainer.arguments.normalization import is_copy_of_normalized, normalize, unpack_containers
from littrainer.arguments.process import ProcessFacts, apply_hardware_choices, partial_state
from littrainer.arguments.rules import apply_global_batch_size, check_values, refuse_unsupported, validate
from littrainer.arguments.secrets import mask_secret
from littrainer.arguments.sharding import normalize_sharding
from littrainer.distributed.environment import set_torchrun_variables
from littrainer.distributed.failures import report_errors_to_agent
from littrainer.distributed.layout import get_requested_sizes

SECRET_ENDING = "_token"


class Serialization(ProcessFacts):
    """Conversions of TrainingArguments to plain values."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # A generated representation would show tokens.
        if cls.__repr__ is Serialization.__repr__:
            cls.__repr__ = Serialization.__repr__  # type: ignore[method-assign]

    def to_dict(self) -> dict[str, Any]:
        """Return a deep copy of the arguments as plain values: choices and dtypes by name, tokens masked."""
        shown = self._get_shown_values()
        return {field.name: _plain(shown[field.name]) for field in dataclasses.fields(self) if field.init}

    def _get_shown_values(self) -> dict[str, Any]:
        # Fields with `init=False` may be unset.
        names = [field.name for field in dataclasses.fields(self) if field.init or hasattr(self, field.name)]
        return {name: mask_secret(name) if name.endswith(SECRET_ENDING) else getattr(self, name) for name in names}

    def to_json_string(self) -> str:
        """Return `to_dict()` as indented JSON, with other objects as text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return `to_dict()` and the batch sizes of this process as numbers, booleans or text."""
        values = self.to_dict()
        values["train_batch_size"] = self.train_batch_size
        values["eval_batch_size"] = self.eval_batch_size
        plain_types = {bool, int, float, str}
        if "torch" in sys.modules:
            plain_types.add(sys.modules["torch"].Tensor)
        return {name: value if type(value) in plain_types else str(value) for name, value in values.items()}

    def __str__(self) -> str:
        lines = "".join(f"{name}={value},\n" for name, value in sorted(self._get_shown_values().items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, AcceleratorConfig):
        # Describes the process, not the training.
        return {name: entry for name, entry in value.to_dict().items() if name != "use_configured_state"}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].dtype):
        return str(value).removeprefix("torch.")
    for method in ("to_dict", "to_json"):
        # Configurations of other libraries.
        if callable(getattr(value, method, None)) and not isinstance(value, type):
            return getattr(value, method)()
    return value


@dataclass
class TrainingArguments(Serialization, GroupedSetters, AcceptsEarlierNames):
    """Arguments of a training run, with the names, order and defaults of transformers.

    The constructor normalizes them: choices become enum members, JSON text becomes a dict, `~` in paths is expanded,
    and derived values are filled in.

    Raises:
        TypeError: a name is unknown; the message suggests the nearest name.
        ValueError: a value or a combination of values is invalid.
        NotImplementedError: littrainer does not support a value.

    Examples:
        >>> from littrainer import TrainingArguments
        >>> args = TrainingArguments("runs/first", learning_rate=3e-5, lr_scheduler_type="cosine")
        >>> args.lr_scheduler_type
        <SchedulerType.COSINE: 'cosine'>
    """

    # Accept JSON text; subclasses extend the list.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        "lr_scheduler_kwargs",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
    ]

    # False if lightning.Trainer, for instance, decides on devices, evaluations and saves.
    is_for_trainer: ClassVar[bool] = True

    default_optim: ClassVar[str] = "adamw_torch_fused"

    def __post_init__(self) -> None:
        set_torchrun_variables()
        report_errors_to_agent()
        is_copy = is_copy_of_normalized(self)
        unpack_containers(self)
        if not is_copy:
            apply_fields_with_earlier_names(self)
        check_values(self)
        is_of_dict = is_copy and isinstance(self.accelerator_config, dict)
        # False draws bars in files too, None on terminals only.
        self._asked_for_bars: bool = self.disable_tqdm is False and not is_copy
        restores = self.restore_callback_states_from_checkpoint
        # With None only early stopping restores its state.
        self._restores_patience: bool = vars(self).get("_restores_patience", restores is not False or is_copy)
        normalize(self, [*self._VALID_DICT_FIELDS, "lightning"])
        self._validate_args()
        # Raise errors before a script loads its model.
        get_requested_sizes(self)
        if self.is_for_trainer:
            # For scripts that call torch.distributed.
            self._init_process_group()
        precision = "fp16" if self.fp16 else "bf16" if self.bf16 else None
        self.mixed_precision: str = precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
        normalize_sharding(self)
        if self.is_for_trainer:
            apply_global_batch_size(self, is_of_dict=is_of_dict)
        self.deepspeed_plugin: Any | None = None
        self.hf_deepspeed_config: Any | None = None
        refuse_unsupported(self)
        if self.is_for_trainer:
            apply_hardware_choices(self)
        set_up_deepspeed(self)
        # For loggers and collectives of accelerate.
        partial_state(self)

    def _validate_args(self) -> None:
        """Raise ValueError for invalid combinations; scripts override it."""
        validate(self)

    _no_sync_in_gradient_accumulation = property(lambda self: not self.deepspeed)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the optimizer steps of the linear warmup: `warmup_steps`, below 1 a share of the run, rounded up.

        Parameters:
            num_training_steps: optimizer steps of the run.
        """
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)


@dataclass
class Seq2SeqTrainingArguments(GenerationFields, TrainingArguments):
    """TrainingArguments with the settings of generation in evaluations of `Seq2SeqTrainer`.

    Raises:
        TypeError, ValueError, NotImplementedError: as TrainingArguments.
    """
