"""Accepted arguments train, or are refused in a line that names the argument; nothing fails deep inside Lightning."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from littrainer import TrainingArguments
from littrainer.arguments.choices import SchedulerType
from tests.scenarios.trainers import quiet_trainer

# Values at the edges of what is accepted, and some beyond what a run of two steps can make sense of.
VALUES: dict[str, list[Any]] = {
    "per_device_train_batch_size": [1, 3, 10**6],
    "per_device_eval_batch_size": [1, 10**6],
    "num_train_epochs": [0, 0.01, 2, 1e9],
    "learning_rate": [0, 1e-30, 1e30],
    "lr_scheduler_type": [member.value for member in SchedulerType],
    "lr_scheduler_kwargs": [None, {}, {"num_cycles": 2}, {"min_lr": 0.1}, {"num_decay_steps": 1}, {"nonsense": 1}],
    "warmup_steps": [0, 0.5, 1.5, 10**9],
    "optim": ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor", "lomo", "galore_adamw"],
    "optim_args": [None, "", "momentum=0.9", "momentum", "nonsense=1", "eps=many"],
    "optim_target_modules": [None, "all-linear", ["nowhere"], "("],
    "weight_decay": [0, 1e30],
    "adam_beta1": [0, 0.999999],
    "adam_epsilon": [0, 1e30],
    "gradient_accumulation_steps": [1, 3, 1000],
    "max_grad_norm": [-1, 0, 1e-30, float("inf")],
    "label_smoothing_factor": [0, 1],
    "label_names": [None, [], ["nonsense"], ["labels"]],
    "bf16": [False, True],
    "bf16_full_eval": [False, True],
    "gradient_checkpointing": [False, True],
    "gradient_checkpointing_kwargs": [None, {"nonsense": 1}],
    "neftune_noise_alpha": [None, 0, 5],
    "torch_empty_cache_steps": [None, 1],
    "auto_find_batch_size": [False, True],
    "auto_micro_batch": [False, True],
    "chunked_loss": [False, True],
    "log_loss_terms": [False, True],
    "logging_strategy": ["no", "steps", "epoch"],
    "logging_steps": [1e-9, 0.5, 1, 10**9],
    "include_num_input_tokens_seen": ["no", "all", "non_padding"],
    "eval_strategy": ["no", "steps", "epoch"],
    "eval_steps": [None, 1e-9, 0.5, 1, 10**9],
    "eval_delay": [0, 0.5, 1e9],
    "eval_on_start": [False, True],
    "eval_at_end": [False, True],
    "eval_accumulation_steps": [None, 1],
    "prediction_loss_only": [False, True],
    "include_for_metrics": [[], ["inputs"], ["loss"], "inputs"],
    "batch_eval_metrics": [False, True],
    "eval_loss_weighting": ["batches", "samples", "labels", "nonsense"],
    "loss_normalization": ["transformers", "exact", "nonsense"],
    "save_strategy": ["no", "steps", "epoch", "best"],
    "save_steps": [-1, 1e-9, 0.5, 1, 10**9],
    "save_total_limit": [None, -1, 0, 1],
    "save_only_model": [False, True],
    "load_best_model_at_end": [False, True],
    "metric_for_best_model": [None, "loss", "nonsense", ""],
    "seed": [0, 2**32 - 1],
    "data_seed": [None, 0, 2**63 - 1],
    "accelerator_config": [None, {"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False}],
    "dataloader_drop_last": [False, True],
    "dataloader_persistent_workers": [False, True],
    "remove_unused_columns": [False, True],
    "signature_columns": [None, [], ["x", "labels"], ["nonsense"]],
    "train_sampling_strategy": ["random", "sequential", "group_by_length", "batch_rebalance"],
    "length_column_name": ["", "nonsense"],
    "skip_memory_metrics": [False, True],
    "lightning": [None, {}, {"nonsense": 1}, {"profiler": "nonsense"}, {"max_epochs": 1}, {"callbacks": []}],
}


@given(
    st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: st.sampled_from(VALUES[name]) for name in names})
    )
)
@settings(max_examples=120, deadline=None, derandomize=True, database=None)
def test_a_combination_trains_or_is_refused_in_one_line_that_names_one_of_its_arguments(
    changes: dict[str, Any],
) -> None:
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            quiet_trainer(folder, **{"max_steps": 2, **changes}).train()
        except (TypeError, ValueError, NotImplementedError, ImportError, KeyError) as error:
            message = str(error)
            assert "\n" not in message and any(name in message for name in TrainingArguments.__dataclass_fields__)
