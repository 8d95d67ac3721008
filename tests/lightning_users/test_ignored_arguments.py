from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from littrainer.lightning.arguments import list_argument_names, resolve_arguments
from littrainer.lightning.ignored_arguments import (
    LIGHTNING_EQUIVALENTS,
    MODULE_ARGUMENTS,
    WARNINGS,
    warn_of_ignored_arguments,
)
from tests.lightning_users.curves import QUIET


def collect_warnings(args: dict[str, Any], **changes: Any) -> str:
    """Return the warnings for arguments.

    Parameters:
        changes: keywords of the `lightning.Trainer`, or its `datamodule` or strategy as an object.
    """
    further = {name: changes.pop(name) for name in ("datamodule", "strategy") if name in changes}
    trainer = pl.Trainer(**{"max_epochs": 3, **QUIET, **changes})
    names = (
        *("max_epochs", "max_steps", "accumulate_grad_batches", "precision", "gradient_clip_val", "accelerator"),
        *("strategy", "loggers", "checkpoint_callbacks", "log_every_n_steps", "progress_bar_callback"),
        *("check_val_every_n_epoch", "val_check_interval", "callbacks"),
    )
    attributes = {"datamodule": None, **{name: getattr(trainer, name) for name in names}, **further}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_ignored_arguments(resolve_arguments(args), SimpleNamespace(**attributes))
    return "\n".join(str(warning.message) for warning in caught)


def test_the_module_uses_all_arguments_without_other_user() -> None:
    assert {
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
        *("optim", "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("average_tokens_across_devices", "loss_normalization", "label_smoothing_factor", "label_names"),
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        *("use_liger_kernel", "liger_kernel_config", "use_cache", "neftune_noise_alpha"),
        *("logging_nan_inf_filter", "prediction_loss_only", "eval_do_concat_batches", "eval_accumulation_steps"),
        *("include_for_metrics", "metric_for_best_model", "eval_loss_weighting"),
        *("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"),
    } == MODULE_ARGUMENTS
    assert set(LIGHTNING_EQUIVALENTS) <= set(list_argument_names())


BEST = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
MONITORS = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(monitor="val_loss")]}


@pytest.mark.parametrize(
    ("args", "keywords", "expected"),
    [
        ({"gradient_accumulation_steps": 4}, {}, ["gradient_accumulation_steps=4 (instead: accumulate_grad_batches)"]),
        ({"max_steps": 5}, {}, ["max_steps=5 (instead: max_steps)"]),
        ({"fp16": True}, {}, ['fp16=True (instead: precision="16-mixed")']),
        ({"save_strategy": "epoch"}, {}, ["ModelCheckpoint"]),
        ({"eval_strategy": "steps", "eval_steps": 3}, {}, ["eval_strategy='steps' (instead: val_", "eval_steps=3"]),
        ({"eval_strategy": "steps"}, {}, ["eval_strategy='steps' (instead: val_check_interval"]),
        ({"per_device_train_batch_size": 2}, {}, ["TrainerDataModule uses it"]),
        ({"per_gpu_train_batch_size": 2}, {}, ["per_device_train_batch_size=2 (the loader's"]),
        ({"fsdp": True}, {}, ["ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1)"]),
        ({"torch_compile_backend": "inductor"}, {}, ["torch_compile_backend='inductor' (instead: torch.compile"]),
        ({"use_cpu": True}, {"accelerator": "auto"}, []),
        ({"max_grad_norm": 0.5}, {"gradient_clip_val": 1.0}, ["max_grad_norm=0.5 (instead: gradient_clip_val)"]),
        (
            {**BEST, "save_only_model": True},
            MONITORS,
            ["load_best_model_at_end=True", "save_only_model=True (instead"],
        ),
        ({**BEST, "greater_is_better": True}, MONITORS, ["load_best_model_at_end=True", "greater_is_better=True"]),
        # Without warning.
        ({"max_grad_norm": 0.5}, {}, []),
        ({"learning_rate": 0.5, "output_dir": "elsewhere", "do_train": True}, {}, []),
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 4}, []),
        ({"max_steps": 5}, {"max_steps": 5}, []),
        ({"num_train_epochs": 2}, {"max_epochs": 2}, []),
        ({"bf16": True}, {"precision": "bf16-mixed"}, []),
        ({"save_strategy": "no", "logging_strategy": "no", "eval_strategy": "epoch", "use_cpu": True}, {}, []),
        ({"max_grad_norm": 0.5}, {"gradient_clip_val": 0.5}, []),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {}, []),
        ({"per_device_train_batch_size": 2}, {"datamodule": SimpleNamespace(args=None)}, []),
    ],
)
def test_ignored_arguments_are_named_with_their_equivalents(
    args: dict[str, Any], keywords: dict[str, Any], expected: list[str]
) -> None:
    message = collect_warnings(args, **keywords)
    assert all(text in message for text in expected)
    assert message.count("(instead: ") + message.count("(the loader's") == len(expected)


def test_clipping_by_a_default_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    WARNINGS.clear()
    with caplog.at_level("INFO"):
        assert {collect_warnings(args) for args in ({}, {}, {"max_grad_norm": 0}, {"max_grad_norm": 0.5})} == {""}
        assert collect_warnings({}, gradient_clip_val=0.5) == ""
    assert caplog.text.count("clipped to max_grad_norm=1.0") == caplog.text.count("clipped to") == 1


def test_a_strategy_that_clips_needs_gradient_clip_val() -> None:
    WARNINGS.clear()
    engine = SimpleNamespace(handles_gradient_accumulation=True)
    message = collect_warnings({}, strategy=engine)
    assert "not clipped to max_grad_norm=1.0" in message and "Set gradient_clip_val" in message
    assert collect_warnings({"max_grad_norm": 0}, strategy=engine) == ""


def test_a_named_default_that_differs_from_lightnings_value_is_ignored_with_a_warning() -> None:
    assert "num_train_epochs=3 (instead: max_epochs)" in collect_warnings({"num_train_epochs": 3}, max_epochs=2)
    assert collect_warnings({"num_train_epochs": 3}, max_epochs=3) == ""
