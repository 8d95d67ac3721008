"""The `accelerator_config` argument: how batches are dispatched, as users of accelerate know it."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from littrainer.arguments.did_you_mean import suggest_name
from littrainer.arguments.json_values import read_json_object

if TYPE_CHECKING:
    import torch

    from littrainer.arguments.fields import ArgumentFields

logger = logging.getLogger(__name__)

# The settings of accelerate's gradient accumulation.
ACCUMULATION_KEYS = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")


@dataclass
class AcceleratorConfig:
    """Settings of batches and of their dispatch between processes.

    With one process `split_batches`, `even_batches` and `sync_each_batch` change nothing, as under accelerate.

    Parameters:
        split_batches: a loader's batch is split over the processes instead of each process drawing its own.
        dispatch_batches: the main process draws the batches and sends them out; None means only for iterable datasets.
            With one process, False changes only the loss of an evaluation over a stream of unknown length: an
            incomplete last batch then counts as much as a full one.
        even_batches: samples from the start are repeated until all processes have equally many.
        use_seedable_sampler: the training sampler gets a new seed for each epoch.
        non_blocking: the host does not wait for copies of a batch; this needs pinned memory.
        gradient_accumulation_kwargs: `num_steps`, taken as `gradient_accumulation_steps` if that is 1;
            `sync_each_batch` synchronises gradients after each micro-batch and not only at the end of a window;
            `adjust_scheduler` and `sync_with_dataloader` have no effect, since the Trainer decides both.
        use_configured_state: take the device of the accelerate state that the script set up before the arguments.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def __post_init__(self) -> None:
        """Refuse unknown settings of the accumulation."""
        given = self.gradient_accumulation_kwargs or {}
        _refuse_unknown("accelerator_config['gradient_accumulation_kwargs']", given, ACCUMULATION_KEYS)

    @classmethod
    def from_dict(cls, settings: dict[str, Any], source: str = "accelerator_config") -> AcceleratorConfig:
        """Build a config from a dict, of which `source` is the name in errors."""
        _refuse_unknown(source, settings, [field.name for field in dataclasses.fields(cls)])
        return cls(**settings)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        """Build a config from a JSON file."""
        source = f"accelerator_config file {os.fspath(json_file)!r}"
        return cls.from_dict(read_json_object(json_file, source), source)

    @classmethod
    def from_argument(cls, value: Any) -> AcceleratorConfig:
        """Build a config from whatever the argument may hold: nothing, a dict, a path, or a finished config."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str | os.PathLike):
            return cls.from_json_file(value)
        forms = "a dict, the path of a JSON file, or an AcceleratorConfig instance"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # A config object of another library; accelerate's own settings have the same names.
            value = dataclasses.asdict(value)
        if isinstance(value, type):
            raise NotImplementedError(f"Tried passing in a callable to `accelerator_config`, {value!r}; give {forms}.")
        if not isinstance(value, dict | None):
            raise TypeError(f"accelerator_config={value!r} is not usable; give {forms}.")
        return cls.from_dict(value or {})

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dict that shares nothing with this config."""
        return dataclasses.asdict(self)

    def pop(self, key: str, default: Any = None) -> Any:
        """Take a setting out of this config and return it; `default` if it is not there."""
        return vars(self).pop(key, default)


def _refuse_unknown(source: str, given: Iterable[Any], known: Sequence[str]) -> None:
    unknown = [f"{key!r} ({suggest_name(str(key), known)})" for key in given if key not in known]
    if unknown:
        raise ValueError(f"{source} has unknown keys: {', '.join(unknown)}. Correct or remove them.")


def configured_device() -> torch.device:
    """Return the device of the state of accelerate that a script has set up."""
    partial_state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    # All objects of that class share this dict. If it is empty, a new object would choose a device.
    if not getattr(partial_state, "_shared_state", None):
        raise ValueError(
            "accelerator_config has use_configured_state=True, and accelerate has no state yet. Make an Accelerator or "
            "a PartialState before the arguments, or leave use_configured_state at False."
        )
    return partial_state().device


def normalize_accelerator_config(args: ArgumentFields) -> None:
    """Read the config that a script has set. Its `num_steps` replaces `gradient_accumulation_steps` if that is 1."""
    config = args.accelerator_config = AcceleratorConfig.from_argument(args.accelerator_config)
    steps = (config.gradient_accumulation_kwargs or {}).get("num_steps", args.gradient_accumulation_steps)
    if args.gradient_accumulation_steps == 1:
        args.gradient_accumulation_steps = steps
    elif steps != args.gradient_accumulation_steps:
        raise ValueError(
            "The `AcceleratorConfig`'s `num_steps` is set but `gradient_accumulation_steps` is greater than 1: "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}, and accelerator_config asks for "
            f"gradient_accumulation_kwargs={{'num_steps': {steps}}}. Set only one of them."
        )
    if config.non_blocking and not args.dataloader_pin_memory:
        logger.warning(
            "accelerator_config has non_blocking=True, and copies from memory that is not pinned block anyway; set "
            "dataloader_pin_memory=True."
        )
