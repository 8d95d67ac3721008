from __future__ import annotations

import multiprocessing

import pytest

from littrainer.arguments import TrainingArguments


@pytest.mark.parametrize(
    ("name", "wrong", "nearest"),
    [
        ("log_level", "warn", "warning"),
        ("log_level_replica", "inform", "info"),
        ("train_sampling_strategy", "randm", "random"),
        ("dataloader_multiprocessing_context", "spwan", "spawn"),
        ("eval_loss_weighting", "sample", "samples"),
    ],
)
def test_a_misspelt_string_choice_suggests_the_nearest_valid_one(name: str, wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{wrong}' is not valid .did you mean '{nearest}'"):
        TrainingArguments(**{name: wrong})


def test_a_start_method_may_be_a_context_object() -> None:
    context = multiprocessing.get_context("spawn")
    args = TrainingArguments(dataloader_multiprocessing_context=context)  # type: ignore[arg-type]
    assert args.dataloader_multiprocessing_context is context


def test_strategies_that_do_not_match_are_named_with_their_values() -> None:
    with pytest.raises(ValueError, match="eval_strategy='epoch' and save_strategy='steps'"):
        TrainingArguments(load_best_model_at_end=True, eval_strategy="epoch")
