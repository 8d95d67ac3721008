"""The `accelerator_config` argument: how batches are dispatched, as users of accelerate know it."""

from __future__ import annotations

import copy
import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from littrainer.arguments.json_values import read_json_object
from littrainer.arguments.nearest import suggestion


@dataclass
class AcceleratorConfig:
    """Settings of batch dispatch between processes.

    Parameters:
        split_batches: a loader's batch is split over the processes instead of each process drawing its own.
        dispatch_batches: the main process draws the batches and sends them out; None means only for iterable datasets.
        even_batches: samples from the start are repeated until all processes have equally many.
        use_seedable_sampler: the training sampler is seeded anew for each epoch.
        non_blocking: copies to the device do not wait for each other.
        gradient_accumulation_kwargs: `num_steps` and `sync_each_batch` of accelerate's gradient accumulation.
        use_configured_state: keep process facts that were set up before the arguments.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    @classmethod
    def from_dict(cls, settings: dict[str, Any], source: str = "accelerator_config") -> AcceleratorConfig:
        """Build a config from a dict; `source` says in errors where the dict came from.

        Raises:
            ValueError: the dict has keys that the config does not know.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [f"{key!r} ({suggestion(str(key), known)})" for key in settings if key not in known]
        if unknown:
            raise ValueError(f"{source} has unknown keys: {', '.join(unknown)}. Correct or remove them.")
        return cls(**settings)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        """Build a config from a JSON file.

        Raises:
            ValueError: the file is missing, holds no JSON object, or has keys that the config does not know.
        """
        source = f"accelerator_config file {os.fspath(json_file)!r}"
        return cls.from_dict(read_json_object(json_file, source), source)

    @classmethod
    def from_argument(cls, value: Any) -> AcceleratorConfig:
        """Build a config from whatever the argument may hold: nothing, a dict, a path, or a finished config.

        Raises:
            TypeError: the value is a class or something else that is no config.
            ValueError: as `from_dict` and `from_json_file`.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, dict):
            return cls.from_dict(value)
        if isinstance(value, str | os.PathLike):
            return cls.from_json_file(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # A config object of another library; accelerate's own settings carry the same names.
            return cls.from_dict({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        raise TypeError(
            f"accelerator_config={value!r} is not usable; give a dict, the path of a JSON file, "
            "or an AcceleratorConfig instance (not the class)."
        )

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dict that shares nothing with this config."""
        return {field.name: copy.deepcopy(getattr(self, field.name)) for field in dataclasses.fields(self)}
