"""TrainingArguments: everything that can be said about a run before it starts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from littrainer.arguments.accelerate_state import partial_state
from littrainer.arguments.deepspeed_plugin import set_up_deepspeed
from littrainer.arguments.earlier_spelling import UnderstandsEarlierNames
from littrainer.arguments.grouped_setters import GroupedSetters
from littrainer.arguments.hardware import apply_hardware_choices
from littrainer.arguments.normalization import normalize, was_normalized
from littrainer.arguments.serialization import Serialization
from littrainer.arguments.sharding import settle_sharding
from littrainer.arguments.support import refuse_unsupported
from littrainer.arguments.validation import validate
from littrainer.arguments.value_checks import check_values
from littrainer.distributed.environment import adopt_launcher_variables
from littrainer.distributed.failure_report import report_errors_to_agent
from littrainer.distributed.layout import requested_sizes


@dataclass
class TrainingArguments(Serialization, GroupedSetters, UnderstandsEarlierNames):
    """The arguments of a training run, with the names, order and defaults of transformers.

    The fields stand by topic in the `fields_*` modules of this package; each says in its metadata what it is for. After
    construction every field holds its one normalized form: choices are enum members, JSON text is a dict, `~` in
    paths is expanded, and values that follow from others are filled in.

    Raises:
        TypeError: a name is unknown; the message names what it probably stands for.
        ValueError: a value or a combination of values cannot be carried out.
        NotImplementedError: a value is valid, and littrainer does not carry it out yet.
    """

    # Fields that hold a dict and may come as JSON text; subclasses extend the list by their own.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        "lr_scheduler_kwargs",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
    ]

    # Whether they decide where a training runs, and when it evaluates and saves; else something beside them does, and
    # what they say about it is neither carried out nor held against the hardware.
    decides_the_run: ClassVar[bool] = True

    # What `optim` is where nobody chooses.
    default_optim: ClassVar[str] = "adamw_torch_fused"

    def __post_init__(self) -> None:
        adopt_launcher_variables()
        report_errors_to_agent()
        check_values(self)
        # Left open, bars are drawn on terminals only.
        self._asked_for_bars: bool = self.disable_tqdm is False and not was_normalized(self)
        normalize(self, [*self._VALID_DICT_FIELDS, "lightning"])
        validate(self)
        # What contradicts itself is refused before a script loads its model.
        requested_sizes(self)
        if self.decides_the_run:
            # Scripts call torch.distributed as soon as they have arguments.
            self._join_other_processes()
        self.mixed_precision: str = self._chosen_precision()
        # What subclasses and libraries on top read to learn which engine plugin is in use: none.
        self.fsdp_plugin_args: dict[str, Any] | None = None
        settle_sharding(self)
        self.deepspeed_plugin: Any | None = None
        self.hf_deepspeed_config: Any | None = None
        refuse_unsupported(self)
        if self.decides_the_run:
            apply_hardware_choices(self)
        set_up_deepspeed(self)
        # Loggers and collectives of accelerate, which libraries on top use, refuse to work without it.
        partial_state(self)

    def _chosen_precision(self) -> str:
        if self.fp16:
            return "fp16"
        if self.bf16:
            return "bf16"
        return os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"

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
