"""TrainingArguments: fields, normalization, rules and serialization."""

from __future__ import annotations

from littrainer.arguments.training_arguments import TrainingArguments

__all__ = ["TrainingArguments"]
