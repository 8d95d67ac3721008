"""An unknown name is answered by what it means before what is spelled like it."""

from __future__ import annotations

import inspect

from littrainer import Seq2SeqTrainingArguments, Trainer, TrainingArguments
from littrainer.arguments.choices import IntervalStrategy, OptimizerNames, SchedulerType
from littrainer.arguments.did_you_mean import OTHER_WORDS, nearest_name

ARGUMENTS = [*inspect.signature(TrainingArguments).parameters]
PARAMETERS = [*inspect.signature(Trainer).parameters]
OPTIMIZERS, SCHEDULES, INTERVALS = (
    [one.value for one in each] for each in (OptimizerNames, SchedulerType, IntervalStrategy)
)


def test_a_name_is_understood() -> None:
    for known, words in (
        (
            ARGUMENTS,
            {
                "max_epochs": "num_train_epochs",
                "lr": "learning_rate",
                "batch_size": "per_device_train_batch_size",
                "scheduler": "lr_scheduler_type",
                "zzzz": None,
            },
        ),
        (OPTIMIZERS, {"AdamW": "adamw_torch", "ADAFACTOR": "adafactor", "adamw_torch_fusd": "adamw_torch_fused"}),
        (SCHEDULES, {"plateau": "reduce_lr_on_plateau"}),
        (INTERVALS, {"epochs": "epoch"}),
        (PARAMETERS, {"collate_fn": "data_collator", "dataset": "train_dataset"}),
    ):
        assert {word: nearest_name(word, known) for word in words} == words


def test_every_name_that_words_stand_for_exists_and_no_word_is_a_name() -> None:
    names = {*ARGUMENTS, *PARAMETERS, *OPTIMIZERS, *SCHEDULES}
    assert set(OTHER_WORDS) <= names
    words = {word for row in OTHER_WORDS.values() for word in row.split()}
    assert not words & {*inspect.signature(Seq2SeqTrainingArguments).parameters}
