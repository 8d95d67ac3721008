"""TrainingArguments: fields by topic, their normal form, the rules between them, and how they are written down."""

from __future__ import annotations

from littrainer.arguments.training_arguments import TrainingArguments

__all__ = ["TrainingArguments"]
