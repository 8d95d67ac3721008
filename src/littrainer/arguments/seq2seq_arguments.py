"""Seq2SeqTrainingArguments: the arguments of a run whose evaluations generate text."""

from __future__ import annotations

from dataclasses import dataclass

from littrainer.arguments.fields_generation import GenerationFields
from littrainer.arguments.training_arguments import TrainingArguments


@dataclass
class Seq2SeqTrainingArguments(GenerationFields, TrainingArguments):
    """TrainingArguments, and what `Seq2SeqTrainer` generates in evaluations.

    Raises:
        TypeError, ValueError, NotImplementedError: as TrainingArguments.
    """
