"""Arguments as a dict, as JSON and as text, with secrets masked in each."""

from __future__ import annotations

import dataclasses
import json
import sys
from enum import Enum
from typing import Any

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.process import ProcessFacts
from littrainer.arguments.secrets import masked

SECRET_ENDING = "_token"


class Serialization(ProcessFacts):
    """How TrainingArguments turn into plain values."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # The dataclass decorator would give each subclass a representation of its own, with tokens in clear.
        if cls.__repr__ is Serialization.__repr__:
            cls.__repr__ = Serialization.__repr__  # type: ignore[method-assign]

    def to_dict(self) -> dict[str, Any]:
        """Every argument as a plain value: choices as their strings, dtypes by name, tokens masked.

        Returns:
            A new dict; its nested dicts are copies too.
        """
        return {
            field.name: masked(field.name) if field.name.endswith(SECRET_ENDING) else _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.init
        }

    def to_json_string(self) -> str:
        """`to_dict` as indented JSON; objects that JSON does not know are written as text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` with the two batch sizes of this process, each value a number, a boolean or text.

        Experiment trackers show these as hyperparameters.
        """
        values = self.to_dict()
        values["train_batch_size"] = self.train_batch_size
        values["eval_batch_size"] = self.eval_batch_size
        kept = {bool, int, float, str}
        if "torch" in sys.modules:
            kept.add(sys.modules["torch"].Tensor)
        return {name: value if type(value) in kept else str(value) for name, value in values.items()}

    def __str__(self) -> str:
        shown = {
            field.name: masked(field.name) if field.name.endswith(SECRET_ENDING) else getattr(self, field.name)
            for field in dataclasses.fields(self)
        }
        lines = "".join(f"{name}={shown[name]},\n" for name in sorted(shown))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, AcceleratorConfig):
        # What this process found set up says nothing about the training; those who compare two dicts would take it so.
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
