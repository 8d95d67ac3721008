"""The `accelerator_config` argument: accelerate's settings of batches."""

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

logger = logging.getLogger(__name__)

ACCUMULATION_KEYS = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")


@dataclass
class AcceleratorConfig:
    """Settings of batches and of their dispatch between processes.

    `split_batches`, `even_batches` and `sync_each_batch` have no effect in a single process.

    Parameters:
        split_batches: split each batch of a loader over the processes instead of drawing a batch per process.
        dispatch_batches: let the main process draw and send batches; None does so for iterable datasets only.
            In a single process, False weights an incomplete last batch fully in the evaluation loss over a stream of
            unknown length.
        even_batches: repeat samples until all processes have equally many.
        use_seedable_sampler: give the training sampler a new seed in each epoch.
        non_blocking: copy batches without blocking the host; needs pinned memory.
        gradient_accumulation_kwargs: `num_steps` replaces a `gradient_accumulation_steps` of 1; `sync_each_batch`
            synchronizes gradients after each micro-batch; `adjust_scheduler` and `sync_with_dataloader` have no effect.
        use_configured_state: take the device of accelerate's existing state.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def __post_init__(self) -> None:
        keys = self.gradient_accumulation_kwargs or {}
        _refuse_unknown("accelerator_config['gradient_accumulation_kwargs']", keys, ACCUMULATION_KEYS)

    @classmethod
    def from_dict(cls, settings: dict[str, Any], source: str = "accelerator_config") -> AcceleratorConfig:
        _refuse_unknown(source, settings, [field.name for field in dataclasses.fields(cls)])
        return cls(**settings)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        source = f"accelerator_config file {os.fspath(json_file)!r}"
        return cls.from_dict(read_json_object(json_file, source), source)

    @classmethod
    def from_argument(cls, value: Any) -> AcceleratorConfig:
        """Build a config from None, a dict, a path or a config."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str | os.PathLike):
            return cls.from_json_file(value)
        forms = "a dict, the path of a JSON file, or an AcceleratorConfig instance"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # A config of another library.
            value = dataclasses.asdict(value)
        if isinstance(value, type):
            raise NotImplementedError(f"Tried passing in a callable to `accelerator_config`, {value!r}; give {forms}.")
        if not isinstance(value, dict | None):
            raise TypeError(f"accelerator_config={value!r} is not usable; give {forms}.")
        return cls.from_dict(value or {})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def pop(self, key: str, default: Any = None) -> Any:
        return vars(self).pop(key, default)


def _refuse_unknown(source: str, keys: Iterable[Any], valid: Sequence[str]) -> None:
    unknown = [f"{key!r} ({suggest_name(str(key), valid)})" for key in keys if key not in valid]
    if unknown:
        raise ValueError(f"{source} has unknown keys: {', '.join(unknown)}. Correct or remove them.")


def get_configured_device() -> torch.device:
    partial_state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    # If it is empty, a new instance would choose a device.
    if not getattr(partial_state, "_shared_state", None):
        raise ValueError(
            "accelerator_config has use_configured_state=True, and accelerate has no state yet. Make an Accelerator or "
            "a PartialState before the arguments, or leave use_configured_state at False."
        )
    return partial_state().device
