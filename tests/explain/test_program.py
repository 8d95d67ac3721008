from __future__ import annotations

import ast
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer, TrainingArguments
from littrainer.arguments.choices import SchedulerType
from littrainer.explain.heading import IN_PROGRAM, Source
from littrainer.explain.program import NotPrintable, program
from tests.explain.factories import seeded_classifier, twelve_rows
from tests.scenarios.models import tiny_bert_config, tiny_gpt2

OWN = Source(model="tests.explain.factories:seeded_classifier", data="tests.explain.factories:twelve_rows")
SMALL: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 0.02,
    "train_sampling_strategy": "sequential",
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "num_train_epochs": 2,
}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(folder / "out"), **{**SMALL, **changes})


def run(text: str, folder: Path) -> dict[str, Any]:
    """The names of the program after it has run."""
    path = folder / "program.py"
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return runpy.run_path(str(path), run_name="__main__")


def trained_weights(names: dict[str, Any]) -> dict[str, torch.Tensor]:
    return names["trainer"].lightning_module.model.state_dict()


# What a plain Lightning program can say as well, in the numbers.
EQUIVALENT: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1, "weight_decay": 0.3},
    {"max_steps": 5, "gradient_accumulation_steps": 2, "max_grad_norm": 0},
    {"num_train_epochs": 1.5, "warmup_steps": 2},
    {"warmup_steps": 0.25},
    {"optim": "sgd", "optim_args": "momentum=0.9"},
    {"optim": "adamw_torch", "adam_beta1": 0.5, "adam_beta2": 0.8, "adam_epsilon": 1e-3},
    {"optim": "adafactor"},
    {"optim": "rmsprop"},
    {"label_smoothing_factor": 0.3},
    {"per_device_train_batch_size": 5, "dataloader_drop_last": True},
    {"eval_strategy": "epoch", "eval_on_start": True},
    {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4, "logging_strategy": "epoch"},
    {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1.5}},
    {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-3, "power": 2.0}, "warmup_steps": 1},
    {"lr_scheduler_type": "constant", "warmup_steps": 4},
    {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4},
    {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 2},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 4}, "warmup_steps": 2},
]


@pytest.mark.parametrize("changes", EQUIVALENT, ids=str)
def test_the_printed_program_trains_to_the_same_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    args = arguments(tmp_path, **changes)
    trainer = Trainer(model=seeded_classifier(), args=args, train_dataset=twelve_rows(), eval_dataset=twelve_rows())
    trainer.train()
    names = run(program(args, OWN), tmp_path)
    assert names["trainer"].global_step == trainer.state.global_step
    untrained = seeded_classifier().state_dict()
    for name, weight in trained_weights(names).items():
        torch.testing.assert_close(weight, trainer.model.state_dict()[name], rtol=1e-4, atol=1e-6)
        assert not torch.equal(weight, untrained[name])


def test_every_schedule_that_follows_no_metric_is_among_those_compared() -> None:
    compared = {changes.get("lr_scheduler_type", "linear") for changes in EQUIVALENT}
    assert compared == {member.value for member in SchedulerType} - {"reduce_lr_on_plateau", "greedy"}


@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": True},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "lr_scheduler_kwargs": {"patience": 1}},
        {
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "load_best_model_at_end": True,
            "save_total_limit": 1,
            "full_determinism": True,
        },
        {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "accuracy", "save_total_limit": 1},
        {"save_strategy": "steps", "save_steps": 0.5, "save_total_limit": 1, "logging_strategy": "steps"},
        {"lightning": {"profiler": "simple"}, "dataloader_num_workers": 1, "dataloader_prefetch_factor": 3},
    ],
    ids=str,
)
def test_a_program_with_stand_ins_runs_as_it_is_printed(tmp_path: Path, changes: dict[str, Any]) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=8, **changes)
    try:
        names = run(program(args), tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert names["trainer"].global_step == 16
    saved = list((tmp_path / "out").glob("*.ckpt"))
    assert len(saved) == (0 if args.save_strategy == "no" else 1)


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForTokenClassification", "GPT2LMHeadModel"])
def test_a_model_can_come_from_a_configuration(tmp_path: Path, kind: str) -> None:
    config = tiny_gpt2().config if kind == "GPT2LMHeadModel" else tiny_bert_config()
    config.architectures = [kind]
    config.save_pretrained(tmp_path)
    args = arguments(tmp_path, max_steps=2, gradient_checkpointing=True)
    names = run(program(args, Source(model=str(tmp_path))), tmp_path)
    model = names["trainer"].lightning_module.model
    assert type(model).__name__ == kind and model.is_gradient_checkpointing and names["trainer"].global_step == 2


def test_a_program_needs_nothing_of_this_package_for_what_torch_has(tmp_path: Path) -> None:
    imports = [
        name.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(program(arguments(tmp_path))))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    ]
    assert {str(name).partition(".")[0] for name in imports} == {"math", "typing", "lightning", "torch"}


def test_what_a_program_leaves_out_is_listed_at_its_top(tmp_path: Path) -> None:
    changes = {"run_name": "one", "train_sampling_strategy": "group_by_length", "metric_for_best_model": "f1"}
    text = ast.get_docstring(ast.parse(program(arguments(tmp_path, lightning={"plugins": [print]}, **changes))))
    assert text is not None and all(f"- {name}: " in text for name in ("lightning", *changes))
    # It would count other optimizer steps.
    assert "- lightning: " in program(arguments(tmp_path, lightning={"limit_train_batches": 0.5}))
    assert "- learning_rate" not in text


def test_the_arguments_a_program_carries_out_are_arguments() -> None:
    assert {*TrainingArguments.__dataclass_fields__} >= IN_PROGRAM


def test_an_optimizer_that_needs_a_models_parameters_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, optim="galore_adamw", optim_target_modules="all-linear")
    with pytest.raises(NotPrintable, match="optim='galore_adamw'"):
        program(args)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_model_that_is_no_name_and_no_configuration_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"--model .*config"):
        program(arguments(tmp_path), Source(model=str(path)))


def test_a_schedule_that_torch_does_not_have_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, lr_scheduler_type="greedy", eval_strategy="steps", eval_steps=1)
    with pytest.raises(NotPrintable, match="greedy"):
        program(args)


def test_a_stand_in_is_not_asked_for_checkpointed_activations(tmp_path: Path) -> None:
    run(program(arguments(tmp_path, gradient_checkpointing=True)), tmp_path)
