"""Errors and warnings with the types and key phrases of transformers, which scripts match on."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers.trainer_pt_utils import AcceleratorConfig as TheirAcceleratorConfig

import littrainer
from littrainer.arguments.accelerator_config import AcceleratorConfig
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments

NAMES = ("Trainer", "TrainingArguments", "EarlyStoppingCallback")
OURS, THEIRS = (
    SimpleNamespace(AcceleratorConfig=config, **{name: getattr(library, name) for name in NAMES})
    for library, config in ((littrainer, AcceleratorConfig), (transformers, TheirAcceleratorConfig))
)
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
UNKNOWN_METRIC: dict[str, Any] = {**EVALUATED, "metric_for_best_model": "f1", "greater_is_better": True}


def trainer(side: Any, callbacks: Any = None, eval_dataset: Any = None, **changes: Any) -> Any:
    return side.Trainer(
        model=VectorClassifier(),
        args=quiet_arguments("out", side.TrainingArguments, **changes),
        train_dataset=Rows(vector_rows(8)),
        eval_dataset=Rows(vector_rows(4)) if eval_dataset is None else eval_dataset,
        callbacks=callbacks,
    )


def resume(side: Any, checkpoint: str | bool) -> None:
    Path("out/checkpoint-3").mkdir(parents=True)
    trainer(side, max_steps=1).train(resume_from_checkpoint=checkpoint)


# Name -> script that raises on both sides, and common part of the messages.
ERRORS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an optimizer of torchdistx": (
        lambda side: trainer(side, optim="adamw_anyprecision").create_optimizer(),
        "https://github.com/pytorch/torchdistx",
    ),
    "the best model by an unknown metric": (
        lambda side: trainer(side, **UNKNOWN_METRIC, save_strategy="best").train(),
        "'eval_f1', which is not found in the evaluation metrics",
    ),
    "a schedule by an unknown metric": (
        lambda side: trainer(
            side, **{**EVALUATED, "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "f1"}
        ).train(),
        "'eval_f1', which is not found in the evaluation metrics",
    ),
    "the best model by no metric": (
        lambda side: trainer(side, **EVALUATED, save_strategy="best"),
        "`args.metric_for_best_model` must be provided",
    ),
    "a checkpoint that is not there": (
        lambda side: resume(side, "out/checkpoint-7"),
        "Can't find a valid checkpoint at out/checkpoint-7",
    ),
    "a checkpoint without files": (
        lambda side: resume(side, "out/checkpoint-3"),
        "Can't find a valid checkpoint at out/checkpoint-3",
    ),
    "the newest checkpoint of none": (
        lambda side: trainer(side, max_steps=1).train(resume_from_checkpoint=True),
        "No valid checkpoint found in output directory (out)",
    ),
    "the class of an AcceleratorConfig": (
        lambda side: quiet_arguments("out", side.TrainingArguments, accelerator_config=side.AcceleratorConfig),
        "Tried passing in a callable to `accelerator_config`",
    ),
    "accumulation that is set twice": (
        lambda side: trainer(
            side,
            gradient_accumulation_steps=2,
            accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 4}},
        ),
        "The `AcceleratorConfig`'s `num_steps` is set but `gradient_accumulation_steps` is greater than 1",
    ),
    "early stopping by no metric": (
        lambda side: trainer(side, callbacks=[side.EarlyStoppingCallback], **EVALUATED).train(),
        "EarlyStoppingCallback requires metric_for_best_model",
    ),
}


@pytest.mark.parametrize("script", ERRORS)
def test_an_error_has_the_type_and_the_phrase_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    run, phrase = ERRORS[script]
    errors = []
    for name, side in (("theirs", THEIRS), ("ours", OURS)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with pytest.raises(Exception) as caught:
            run(side)
        errors.append(caught.value)
        assert phrase in str(caught.value)
    theirs, ours = errors
    assert isinstance(ours, type(theirs))


def test_the_warning_about_multi_label_smoothing_equals_that_of_transformers(tmp_path: Path) -> None:
    for side in (THEIRS, OURS):
        model: Any = VectorClassifier()
        model.config = SimpleNamespace(problem_type="multi_label_classification", use_cache=False)
        args = quiet_arguments(tmp_path, side.TrainingArguments, label_smoothing_factor=0.3)
        with pytest.warns(UserWarning, match="Label smoothing is not compatible with multi-label classification"):
            assert side.Trainer(model, args).label_smoother is None
