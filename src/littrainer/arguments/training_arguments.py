"""TrainingArguments and Seq2SeqTrainingArguments: everything that can be said about a run before it starts."""

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
from littrainer.arguments.normalization import normalize, unpack_containers, was_normalized
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
        # The dataclass decorator would give each subclass a representation that shows tokens.
        if cls.__repr__ is Serialization.__repr__:
            cls.__repr__ = Serialization.__repr__  # type: ignore[method-assign]

    def to_dict(self) -> dict[str, Any]:
        """Every argument as a plain value: choices as their strings, dtypes by name, tokens mask_secret.

        Returns:
            A new dict; its nested dicts are copies too.
        """
        shown = self._shown()
        return {field.name: _plain(shown[field.name]) for field in dataclasses.fields(self) if field.init}

    def _shown(self) -> dict[str, Any]:
        # A field of a subclass that its constructor does not take may not be set yet.
        names = [field.name for field in dataclasses.fields(self) if field.init or hasattr(self, field.name)]
        return {name: mask_secret(name) if name.endswith(SECRET_ENDING) else getattr(self, name) for name in names}

    def to_json_string(self) -> str:
        """`to_dict` as indented JSON; objects that JSON does not know are written as text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` and the two batch sizes of this process, for trackers: each value a number, a boolean or text."""
        values = self.to_dict()
        values["train_batch_size"] = self.train_batch_size
        values["eval_batch_size"] = self.eval_batch_size
        kept = {bool, int, float, str}
        if "torch" in sys.modules:
            kept.add(sys.modules["torch"].Tensor)
        return {name: value if type(value) in kept else str(value) for name, value in values.items()}

    def __str__(self) -> str:
        lines = "".join(f"{name}={value},\n" for name, value in sorted(self._shown().items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, AcceleratorConfig):
        # The entry is about the process, not about the training, so two dicts are compared without it.
        return {name: entry for name, entry in value.to_dict().items() if name != "use_configured_state"}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].dtype):
        return str(value).removeprefix("torch.")
    for method in ("to_dict", "to_json"):
        # Configurations of other libraries: a quantization config among the keywords of a model, a parallelism config.
        if callable(getattr(value, method, None)) and not isinstance(value, type):
            return getattr(value, method)()
    return value


@dataclass
class TrainingArguments(Serialization, GroupedSetters, AcceptsEarlierNames):
    """The arguments of a training run, with the names, order and defaults of transformers.

    The fields stand by topic in the module `fields` of this package; each says in its metadata what it is for. After
    construction every field holds its one normalized form: choices are enum members, JSON text is a dict, `~` in
    paths is expanded, and values that follow from others are filled in.

    Raises:
        TypeError: a name is unknown; the message names what it probably stands for.
        ValueError: a value or a combination of values cannot be carried out.
        NotImplementedError: a value is valid, and littrainer does not carry it out yet.
    """

    # Fields that hold a dict and may come as JSON text; subclasses extend the list.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        "lr_scheduler_kwargs",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
    ]

    # Whether they decide where a training runs, and when it evaluates and saves. If something else does, what they say
    # about it is neither carried out nor checked against the hardware.
    is_for_trainer: ClassVar[bool] = True

    # The default of `optim`.
    default_optim: ClassVar[str] = "adamw_torch_fused"

    def __post_init__(self) -> None:
        set_torchrun_variables()
        report_errors_to_agent()
        is_copy = was_normalized(self)
        unpack_containers(self)
        # In a copy today's names hold what they set.
        if not is_copy:
            apply_fields_with_earlier_names(self)
        check_values(self)
        # Left open, bars are drawn on terminals only.
        is_of_dict = is_copy and isinstance(self.accelerator_config, dict)
        self._asked_for_bars: bool = self.disable_tqdm is False and not is_copy
        restores = self.restore_callback_states_from_checkpoint
        # Left open it reads as False, as in transformers, and early stopping alone goes on.
        self._restores_patience: bool = vars(self).get("_restores_patience", restores is not False or is_copy)
        normalize(self, [*self._VALID_DICT_FIELDS, "lightning"])
        self._validate_args()
        # Contradictions are refused before a script loads its model.
        get_requested_sizes(self)
        if self.is_for_trainer:
            # Scripts call torch.distributed as soon as they have arguments.
            self._join_other_processes()
        named = "fp16" if self.fp16 else "bf16" if self.bf16 else None
        self.mixed_precision: str = named or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
        normalize_sharding(self)
        if self.is_for_trainer:
            apply_global_batch_size(self, is_of_dict=is_of_dict)
        self.deepspeed_plugin: Any | None = None
        self.hf_deepspeed_config: Any | None = None
        refuse_unsupported(self)
        if self.is_for_trainer:
            apply_hardware_choices(self)
        set_up_deepspeed(self)
        # Loggers and collectives of accelerate, which libraries on top use, refuse to work without it.
        partial_state(self)

    def _validate_args(self) -> None:
        """Refuse what cannot be carried out together; scripts override it."""
        validate(self)

    # Copies of transformers' loop read whether gradients are exchanged only at the end of a window.
    _no_sync_in_gradient_accumulation = property(lambda self: not self.deepspeed)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Optimizer steps of the linear warmup.

        Parameters:
            num_training_steps: optimizer steps of the whole run.

        Returns:
            `warmup_steps` from 1 up, else that share of the run, rounded up.
        """
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)


@dataclass
class Seq2SeqTrainingArguments(GenerationFields, TrainingArguments):
    """TrainingArguments, and what `Seq2SeqTrainer` generates in evaluations.

    Raises:
        TypeError, ValueError, NotImplementedError: as TrainingArguments.
    """
