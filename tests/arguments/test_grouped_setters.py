from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import transformers

from littrainer.arguments import TrainingArguments
from littrainer.arguments.choices import IntervalStrategy, SaveStrategy

# Method -> keywords that differ from all defaults.
CALLS: dict[str, dict[str, Any]] = {
    "set_training": {
        "learning_rate": 1e-3,
        "batch_size": 3,
        "weight_decay": 0.1,
        "num_epochs": 1.5,
        "max_steps": 7,
        "gradient_accumulation_steps": 2,
        "seed": 5,
        "activation_checkpointing": True,
    },
    "set_evaluate": {
        "strategy": "steps",
        "steps": 9,
        "batch_size": 3,
        "accumulation_steps": 4,
        "delay": 2,
        "loss_only": True,
    },
    "set_testing": {"batch_size": 3, "loss_only": True},
    "set_save": {"strategy": "epoch", "steps": 9, "total_limit": 2, "on_each_node": True},
    "set_logging": {
        "strategy": "epoch",
        "steps": 9,
        "report_to": ["tensorboard"],
        "level": "info",
        "first_step": True,
        "nan_inf_filter": True,
        "on_each_node": True,
        "replica_level": "error",
    },
    "set_push_to_hub": {
        "model_id": "org/name",
        "strategy": "checkpoint",
        "token": "secret",
        "private_repo": True,
        "always_push": True,
        "revision": "branch",
    },
    "set_optimizer": {
        "name": "sgd",
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "beta1": 0.8,
        "beta2": 0.7,
        "epsilon": 1e-6,
        "args": "momentum=0.5",
    },
    "set_lr_scheduler": {"name": "cosine", "num_epochs": 2.0, "max_steps": 11, "warmup_steps": 0.1},
    "set_dataloader": {
        "train_batch_size": 3,
        "eval_batch_size": 5,
        "drop_last": True,
        "num_workers": 2,
        "pin_memory": False,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "multiprocessing_context": "fork",
        "in_order": False,
        "auto_find_batch_size": True,
        "ignore_data_skip": True,
        "sampler_seed": 4,
    },
}


def values_after(cls: Any, method: str, keywords: dict[str, Any]) -> dict[str, Any]:
    args = cls("out")
    assert getattr(args, method)(**keywords) is args
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(transformers.TrainingArguments)}


@pytest.mark.parametrize("method", CALLS)
def test_a_setter_sets_what_transformers_sets(method: str) -> None:
    ours = values_after(TrainingArguments, method, CALLS[method])
    theirs = values_after(transformers.TrainingArguments, method, CALLS[method])
    ours.pop("accelerator_config"), theirs.pop("accelerator_config")
    assert ours == theirs


def test_setters_can_be_chained() -> None:
    args = TrainingArguments("out").set_training(max_steps=3, gradient_checkpointing=True).set_save("best")
    args = args.set_logging(report_to=None).set_evaluate("epoch")
    assert (args.activation_checkpointing, args.gradient_checkpointing, args.report_to) == (True, True, [])
    # Training compares with it.
    assert args.eval_delay == 0
    assert (args.max_steps, args.eval_strategy, args.save_strategy) == (3, IntervalStrategy.EPOCH, SaveStrategy.BEST)
    assert (args.do_train, args.do_eval, args.do_predict) == (True, True, False)


@pytest.mark.parametrize("name", ["eval", "save", "logging"])
def test_an_interval_of_0_steps_is_refused(name: str) -> None:
    method = {"eval": "set_evaluate"}.get(name, f"set_{name}")
    with pytest.raises(ValueError, match=f'{name}_strategy="steps" needs {name}_steps above 0'):
        getattr(TrainingArguments("out"), method)(strategy="steps", steps=0)


def test_a_value_that_cannot_be_right_is_refused_and_nothing_is_changed() -> None:
    args = TrainingArguments("out")
    with pytest.raises(ValueError, match="per_device_train_batch_size=0"):
        args.set_training(learning_rate=1.0, batch_size=0)
    assert (args.learning_rate, args.per_device_train_batch_size, args.do_train) == (5e-5, 8, False)
    with pytest.raises(ValueError, match="'sgdd' is not a valid OptimizerNames"):
        args.set_optimizer("sgdd")


@pytest.mark.parametrize("method", ["set_evaluate", "set_testing"])
def test_tracing_is_refused_and_its_absence_accepted(method: str) -> None:
    getattr(TrainingArguments("out"), method)(jit_mode=False)
    with pytest.raises(ValueError, match="torch_compile"):
        getattr(TrainingArguments("out"), method)(jit_mode=True)


def test_a_warmup_ratio_of_0_leaves_the_steps_and_another_replaces_them() -> None:
    assert TrainingArguments("out").set_lr_scheduler(warmup_steps=100, warmup_ratio=0.0).warmup_steps == 100
    with pytest.warns(FutureWarning, match=r"warmup_steps=0\.1"):
        assert TrainingArguments("out").set_lr_scheduler(warmup_steps=100, warmup_ratio=0.1).warmup_steps == 0.1
