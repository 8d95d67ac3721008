"""Arguments that are right one by one and contradict each other are refused in one line that names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from littrainer.arguments import TrainingArguments
from littrainer.training.checks import check_arguments

A_FEW = settings(max_examples=40, deadline=None, derandomize=True, database=None)

BEST = {"load_best_model_at_end": True}
CONTRADICTIONS: list[dict[str, Any]] = [
    {"fp16": True, "bf16": True},
    {"fp16_full_eval": True, "bf16_full_eval": True},
    {**BEST},
    {**BEST, "eval_strategy": "epoch", "save_strategy": "steps"},
    {**BEST, "eval_strategy": "steps", "save_strategy": "epoch"},
    {**BEST, "eval_strategy": "epoch", "save_strategy": "no"},
    {**BEST, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 6},
    {**BEST, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 100},
    {**BEST, "eval_strategy": "steps", "eval_steps": 100, "save_steps": 0.5},
    {**BEST, "eval_strategy": "steps", "eval_steps": 0.2, "save_steps": 0.3},
    {"logging_strategy": "steps", "logging_steps": 0},
    {"logging_strategy": "steps", "logging_steps": 1.5},
    {"eval_strategy": "steps", "eval_steps": 2.5},
    {"save_strategy": "steps", "save_steps": 10.5},
    {"eval_strategy": "steps", "logging_strategy": "no", "logging_steps": 0},
    {"lr_scheduler_type": "reduce_lr_on_plateau"},
    {"lr_scheduler_type": "greedy", "eval_strategy": "no"},
    {"dataloader_prefetch_factor": 2},
    {"dataloader_prefetch_factor": 2, "dataloader_num_workers": 0},
]


@pytest.mark.parametrize("keywords", CONTRADICTIONS, ids=str)
def test_arguments_that_contradict_each_other_are_named(keywords: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        TrainingArguments(**keywords)
    message = str(caught.value)
    assert "\n" not in message
    named = [name for name in keywords if name in message]
    assert named


@pytest.mark.parametrize("first", ["fp16", "fp16_full_eval"])
def test_both_half_precisions_are_named(first: str) -> None:
    second = first.replace("fp16", "bf16")
    with pytest.raises(ValueError, match=f"{first} and {second} are both set; choose one"):
        TrainingArguments(**{first: True, second: True})


@pytest.mark.parametrize(
    "keywords", [{"dataloader_persistent_workers": True}, {"dataloader_multiprocessing_context": "spawn"}], ids=str
)
def test_settings_of_loader_processes_need_such_processes_when_a_trainer_is_made(
    tmp_path: Path, keywords: dict[str, Any]
) -> None:
    args = TrainingArguments(str(tmp_path), **keywords)
    with pytest.raises(ValueError, match=f"{next(iter(keywords))}=.* needs loader processes.*dataloader_num_workers"):
        check_arguments(args)
    args.dataloader_num_workers = 1
    check_arguments(args)


@given(eval_steps=st.integers(1, 50), factor=st.integers(1, 9), off=st.integers(0, 49))
@A_FEW
def test_the_best_model_needs_each_save_to_follow_an_evaluation(eval_steps: int, factor: int, off: int) -> None:
    save_steps = eval_steps * factor + off % eval_steps
    keywords: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": eval_steps, "save_steps": save_steps, **BEST}
    if save_steps % eval_steps == 0:
        assert TrainingArguments(**keywords).save_steps == save_steps
        return
    with pytest.raises(ValueError, match=f"save_steps={save_steps} is not a multiple of eval_steps={eval_steps}"):
        TrainingArguments(**keywords)


@given(whole=st.integers(1, 1000), part=st.floats(0.01, 0.99))
@A_FEW
@pytest.mark.parametrize("name", ["logging_steps", "eval_steps", "save_steps"])
def test_from_one_up_steps_are_whole_and_below_one_they_are_a_share(name: str, whole: int, part: float) -> None:
    strategy = {"eval_strategy": "steps"} if name == "eval_steps" else {}
    assert getattr(TrainingArguments(**{name: float(whole)}, **strategy), name) == whole
    assert getattr(TrainingArguments(**{name: part}, **strategy), name) == part
    with pytest.raises(ValueError, match=f"{name}=.*not a whole number"):
        TrainingArguments(**{name: whole + part}, **strategy)
