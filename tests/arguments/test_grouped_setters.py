from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import transformers

from littrainer.arguments import TrainingArguments
from littrainer.arguments.choices import IntervalStrategy, SaveStrategy

# Non-default values that cannot be derived from the defaults.
OTHER_VALUES: dict[str, Any] = {
    "model_id": "org/name",
    "token": "secret",
    "revision": "branch",
    "args": "momentum=0.5",
    "private_repo": True,
    "report_to": ["tensorboard"],
    "level": "info",
    "replica_level": "error",
    "multiprocessing_context": "fork",
    "beta1": 0.8,
    "beta2": 0.7,
    "warmup_steps": 0.1,
    "jit_mode": False,
    "warmup_ratio": None,
    "gradient_checkpointing": None,
    "activation_checkpointing": True,
}
STRATEGIES = {"set_evaluate": "steps", "set_save": "epoch", "set_logging": "epoch", "set_push_to_hub": "checkpoint"}
NAMES = {"set_optimizer": "sgd", "set_lr_scheduler": "cosine"}
METHODS = [name for name in dir(transformers.TrainingArguments) if name.startswith("set_")]


def make_keywords(method: str) -> dict[str, Any]:
    chosen = {**OTHER_VALUES, "strategy": STRATEGIES.get(method), "name": NAMES.get(method)}
    parameters = inspect.signature(getattr(TrainingArguments, method)).parameters
    return {
        name: chosen[name]
        if name in chosen
        else not parameter.default
        if isinstance(parameter.default, bool)
        else (parameter.default or 0) + 3
        for name, parameter in parameters.items()
        if name != "self" and name in inspect.signature(getattr(transformers.TrainingArguments, method)).parameters
    }


def call_setter(cls: Any, method: str, keywords: dict[str, Any]) -> dict[str, Any]:
    args = cls("out")
    assert getattr(args, method)(**keywords) is args
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(transformers.TrainingArguments)}


@pytest.mark.parametrize("method", METHODS)
def test_a_setter_sets_the_same_values_as_in_transformers(method: str) -> None:
    keywords = make_keywords(method)
    ours = call_setter(TrainingArguments, method, keywords)
    theirs = call_setter(transformers.TrainingArguments, method, keywords)
    ours.pop("accelerator_config"), theirs.pop("accelerator_config")
    assert ours == theirs


def test_setters_can_be_chained() -> None:
    args = TrainingArguments("out").set_training(max_steps=3, gradient_checkpointing=True).set_save("best")
    args = args.set_logging(report_to="none").set_evaluate("epoch")
    assert (args.activation_checkpointing, args.gradient_checkpointing, args.report_to) == (True, True, [])
    assert args.eval_delay == 0
    assert (args.max_steps, args.eval_strategy, args.save_strategy) == (3, IntervalStrategy.EPOCH, SaveStrategy.BEST)
    assert (args.do_train, args.do_eval, args.do_predict) == (True, True, False)


@pytest.mark.parametrize("name", ["eval", "save", "logging"])
def test_an_interval_of_0_steps_raises(name: str) -> None:
    method = {"eval": "set_evaluate"}.get(name, f"set_{name}")
    with pytest.raises(ValueError, match=f'{name}_strategy="steps" needs {name}_steps above 0'):
        getattr(TrainingArguments("out"), method)(strategy="steps", steps=0)


def test_an_invalid_value_raises_and_changes_nothing() -> None:
    args = TrainingArguments("out")
    with pytest.raises(ValueError, match="per_device_train_batch_size=0"):
        args.set_training(learning_rate=1.0, batch_size=0)
    assert (args.learning_rate, args.per_device_train_batch_size, args.do_train) == (5e-5, 8, False)
    with pytest.raises(ValueError, match="'sgdd' is not a valid OptimizerNames"):
        args.set_optimizer("sgdd")
    for method in (args.set_evaluate, args.set_testing):
        method(jit_mode=False)
        with pytest.raises(ValueError, match="torch_compile"):
            method(jit_mode=True)


def test_only_a_positive_warmup_ratio_replaces_the_warmup_steps() -> None:
    assert TrainingArguments("out").set_lr_scheduler(warmup_steps=100, warmup_ratio=0.0).warmup_steps == 100
    with pytest.warns(FutureWarning, match=r"warmup_steps=0\.1"):
        args = TrainingArguments("out").set_lr_scheduler(warmup_steps=100, warmup_ratio=0.1)
    assert args.warmup_steps == 0.1 and args.warmup_ratio is None


@dataclasses.dataclass
class ScriptArguments(TrainingArguments):
    token: str = "of the script"
    steps: int = 3
    later: int = dataclasses.field(init=False)


def test_fields_of_a_script_with_the_names_of_parameters_do_not_change() -> None:
    args = ScriptArguments("out").set_push_to_hub("me/model", token="hf_secret").set_save(steps=7)
    assert (args.token, args.steps, args.hub_token, args.save_steps) == ("of the script", 3, "hf_secret", 7)
    assert "later" not in args.to_dict() and "hf_secret" not in str(args)
