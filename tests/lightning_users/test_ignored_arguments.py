from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

from littrainer.lightning.arguments import arguments_from, names_of_arguments
from littrainer.lightning.ignored_arguments import (
    ABOUT_DATA,
    ACTED_ON,
    LEFT_TO_LIGHTNING,
    NOTED,
    warn_of_ignored_arguments,
)
from tests.lightning_users.curves import QUIET


def told(args: dict[str, Any], datamodule: Any = None, **keywords: Any) -> str:
    trainer = pl.Trainer(**{"max_epochs": 3, **QUIET, **keywords})
    trainer.datamodule = datamodule  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_ignored_arguments(arguments_from(args), SimpleNamespace(**_read(trainer, datamodule)))
    return "\n".join(str(one.message) for one in caught)


def _read(trainer: pl.Trainer, datamodule: Any) -> dict[str, Any]:
    names = (
        *("max_epochs", "max_steps", "accumulate_grad_batches", "precision", "gradient_clip_val", "accelerator"),
        *("strategy", "loggers", "checkpoint_callbacks", "log_every_n_steps", "progress_bar_callback"),
        *("check_val_every_n_epoch", "val_check_interval", "callbacks"),
    )
    return {**{name: getattr(trainer, name) for name in names}, "datamodule": datamodule}


# Fields that scripts read.
OF_SCRIPTS = frozenset(("output_dir", "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank"))


def test_each_argument_is_acted_on_or_left_to_somebody() -> None:
    tables = (ACTED_ON, ABOUT_DATA, OF_SCRIPTS, frozenset(LEFT_TO_LIGHTNING))
    names = set(names_of_arguments())
    assert names == set().union(*tables) & names == set().union(*tables) - {"group_by_length"}
    assert sum(map(len, tables)) == len(set().union(*tables))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 (instead: accumulate_grad_batches)"),
        ({"max_steps": 5}, "max_steps=5 (instead: max_steps)"),
        ({"fp16": True}, 'fp16=True (instead: precision="16-mixed")'),
        ({"save_strategy": "epoch"}, "ModelCheckpoint"),
        ({"max_grad_norm": 0.5}, ""),
        ({"eval_strategy": "steps", "eval_steps": 3}, "eval_strategy='steps' (instead: val_check_interval"),
        ({"learning_rate": 0.5, "output_dir": "elsewhere", "do_train": True}, ""),
        ({"per_device_train_batch_size": 2}, "TrainerDataModule acts on it"),
        ({"per_gpu_train_batch_size": 2}, "per_device_train_batch_size=2 (the loader's"),
        ({"fsdp": True}, "ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1)"),
    ],
)
def test_what_is_not_acted_on_is_told_with_what_to_give_instead(args: dict[str, Any], expected: str) -> None:
    found = told(args)
    assert expected in found and bool(found) is bool(expected)


@pytest.mark.parametrize(
    ("args", "keywords"),
    [
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 4}),
        ({"max_steps": 5}, {"max_steps": 5}),
        ({"num_train_epochs": 2}, {"max_epochs": 2}),
        ({"bf16": True}, {"precision": "bf16-mixed"}),
        ({"save_strategy": "no", "logging_strategy": "no", "eval_strategy": "epoch", "use_cpu": True}, {}),
        ({"max_grad_norm": 0.5}, {"gradient_clip_val": 0.5}),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {}),
    ],
)
def test_nothing_is_told_where_the_lightning_trainer_agrees(args: dict[str, Any], keywords: dict[str, Any]) -> None:
    assert told(args, **keywords) == ""


@pytest.mark.parametrize(
    ("args", "keywords"),
    [
        ({"eval_strategy": "steps"}, {}),
        ({"torch_compile": True}, {}),
        ({"torch_compile_backend": "inductor"}, {}),
        ({"fsdp": True}, {}),
        ({"use_cpu": True}, {"accelerator": "auto"}),
        ({"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}, {}),
    ],
)
def test_what_follows_from_an_argument_is_not_told_beside_it(args: dict[str, Any], keywords: dict[str, Any]) -> None:
    assert set(re.findall(r"(\w+)=[^()]* \((?:instead|the loader)", told(args, **keywords))) <= set(args)


def test_what_of_checkpoints_is_not_done_is_told_by_itself() -> None:
    best = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    best["greater_is_better"] = False
    saver = pl.callbacks.ModelCheckpoint(monitor="val_loss")
    found = told({**best, "save_only_model": True}, enable_checkpointing=True, callbacks=[saver])
    assert "load_best_model_at_end=True (instead: ckpt_path=" in found
    assert "save_only_model=True (instead: ModelCheckpoint(save_weights_only=True))" in found
    assert not {"save_strategy", "greater_is_better"} & {part.split("=")[0] for part in found.split(" ")}
    saver = pl.callbacks.ModelCheckpoint(monitor="val_loss", save_weights_only=True, mode="max")
    found = told({**best, "save_only_model": True}, enable_checkpointing=True, callbacks=[saver])
    assert "save_only_model" not in found and "greater_is_better=False" in found


def test_another_bound_of_the_gradients_is_told() -> None:
    assert "max_grad_norm=0.5 (instead: gradient_clip_val)" in told({"max_grad_norm": 0.5}, gradient_clip_val=1.0)


def test_arguments_about_data_are_the_data_modules_where_there_is_one() -> None:
    assert told({"per_device_train_batch_size": 2}, datamodule=SimpleNamespace(args=None)) == ""


def test_clipping_by_a_default_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    NOTED.clear()
    with caplog.at_level("INFO"):
        for args in ({}, {}, {"max_grad_norm": 0}, {"max_grad_norm": 0.5}):
            assert told(args) == ""
        assert told({}, gradient_clip_val=0.5) == ""
    assert caplog.text.count("clipped to max_grad_norm=1.0") == caplog.text.count("clipped to") == 1


def test_an_engine_that_clips_by_itself_is_to_be_given_the_bound() -> None:
    trainer = pl.Trainer(**QUIET)
    NOTED.clear()
    read = {**_read(trainer, None), "strategy": SimpleNamespace(handles_gradient_accumulation=True)}
    with pytest.warns(UserWarning, match=r"not clipped to max_grad_norm=1\.0.*Set gradient_clip_val"):
        warn_of_ignored_arguments(arguments_from(None), SimpleNamespace(**read))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_ignored_arguments(arguments_from({"max_grad_norm": 0}), SimpleNamespace(**read))
