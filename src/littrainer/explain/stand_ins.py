"""A Trainer made only to be explained: a model of one weight, one sample, and no trace on the disk."""

from __future__ import annotations

import copy
import tempfile
from typing import Any, TypeVar

from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments, TrainingArguments

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def trainer_for(args: Seq2SeqTrainingArguments) -> Any:
    """A Trainer with these arguments, whose model and data stand for any."""
    from torch import nn

    from littrainer.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        copied = with_folder(args, folder)
        # A model of one weight generates nothing.
        copied.predict_with_generate, copied.generation_config = False, None
        return Trainer(
            model=nn.Linear(1, 1),
            args=copied,
            train_dataset=[{"input": 0.0}],
            eval_dataset=[{"input": 0.0}],
        )


def with_folder(args: Arguments, folder: str) -> Arguments:
    """The same arguments with another output folder, since a Trainer makes its folder."""
    copied = copy.copy(args)
    copied.output_dir = folder
    return copied
