"""An unknown name is answered by what it means before what is spelled like it."""

from __future__ import annotations

import inspect

import pytest

from littrainer import Seq2SeqTrainingArguments, Trainer, TrainingArguments
from littrainer.arguments.choices import IntervalStrategy, OptimizerNames, SchedulerType
from littrainer.arguments.did_you_mean import OTHER_WORDS, nearest_name

ARGUMENTS = [*inspect.signature(TrainingArguments).parameters]
PARAMETERS = [*inspect.signature(Trainer).parameters]
OPTIMIZERS, SCHEDULES, INTERVALS = (
    [one.value for one in each] for each in (OptimizerNames, SchedulerType, IntervalStrategy)
)


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("epochs", ARGUMENTS, "num_train_epochs"),
        ("max_epochs", ARGUMENTS, "num_train_epochs"),
        ("lr", ARGUMENTS, "learning_rate"),
        ("batch_size", ARGUMENTS, "per_device_train_batch_size"),
        ("accumulation_steps", ARGUMENTS, "gradient_accumulation_steps"),
        ("scheduler", ARGUMENTS, "lr_scheduler_type"),
        ("adamW", OPTIMIZERS, "adamw_torch"),
        ("AdamW", OPTIMIZERS, "adamw_torch"),
        ("adam", OPTIMIZERS, "adamw_torch"),
        ("ADAFACTOR", OPTIMIZERS, "adafactor"),
        ("adamw_torch_fusd", OPTIMIZERS, "adamw_torch_fused"),
        ("plateau", SCHEDULES, "reduce_lr_on_plateau"),
        ("epochs", INTERVALS, "epoch"),
        ("collate_fn", PARAMETERS, "data_collator"),
        ("dataset", PARAMETERS, "train_dataset"),
        ("zzzz", ARGUMENTS, None),
    ],
)
def test_a_name_is_understood(word: str, known: list[str], meant: str | None) -> None:
    assert nearest_name(word, known) == meant


def test_every_name_that_words_stand_for_exists_and_no_word_is_a_name() -> None:
    names = {*ARGUMENTS, *PARAMETERS, *OPTIMIZERS, *SCHEDULES}
    assert set(OTHER_WORDS) <= names
    words = {word for row in OTHER_WORDS.values() for word in row.split()}
    assert not words & {*inspect.signature(Seq2SeqTrainingArguments).parameters}
