"""Every argument counts: for each there is something to see that differs between two values.

`EFFECTS` holds, for each argument, two values and what to look at. What cannot be seen in a short run on a CPU is in
`SEEN_ELSEWHERE`, with the test that fails when the argument is ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from littrainer import TrainingArguments
from tests.scenarios.observations import (
    batches_by_length,
    best,
    cache_in_config,
    checkpointing_of_layers,
    columns_seen,
    determinism,
    device,
    dtype_in_evaluation,
    evaluation_batches,
    events,
    files,
    files_after_a_signal,
    first_step_of_a_second_training,
    folder_used,
    grouped_order,
    handed_to_metrics,
    in_another_process,
    kept_for_the_script,
    language_weights,
    last_or_best_weights,
    level_in_a_replica,
    level_of_logger,
    lightning_profiler,
    logged_losses,
    loss_over_unequal_batches,
    metrics_about_memory,
    moves_to_the_host,
    order,
    patience_after_resume,
    pinning_for_a_gpu,
    precision_on_a_gpu,
    predictions,
    printing_callback,
    projected_weights,
    rows_read_after_resume,
    steps,
    stopped_at_overflow,
    threads_while_training,
    token_logs,
    training_loader,
    weights,
    writing_threads,
)

ROOT = Path(__file__).parent


class Effect(NamedTuple):
    """Where an argument shows.

    Parameters:
        first, second: two of its values.
        look: takes a folder and arguments, returns what differs between the two.
        beside: further arguments, the same for both values.
    """

    first: Any
    second: Any
    look: Callable[..., Any]
    beside: dict[str, Any] = {}  # noqa: RUF012


BY_STEPS = {"logging_strategy": "steps", "logging_steps": 1}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
SAVING = {"save_strategy": "steps", "save_steps": 2}
ADAM = {"optim": "adamw_torch"}
WORKERS = {"dataloader_num_workers": 1}

EFFECTS: dict[str, Effect] = {
    # Schedule and length of the run
    "output_dir": Effect("one", "two", folder_used),
    "per_device_train_batch_size": Effect(2, 4, steps),
    "num_train_epochs": Effect(1, 1.5, steps),
    "max_steps": Effect(1, 2, steps),
    "save_minutes": Effect(None, 0, files),
    "eval_minutes": Effect(None, 0, events),
    "max_minutes": Effect(None, 0, steps),
    "hang_timeout": Effect(None, 600, threads_while_training),
    "max_tokens_per_batch": Effect(None, 12, batches_by_length),
    "pack_to_length": Effect(None, 12, batches_by_length),
    "on_nonfinite": Effect("warn", "rollback", files, SAVING),
    "spike_factor": Effect(None, 1, weights, {"on_nonfinite": "skip", "max_steps": 25}),
    "loss_normalization": Effect("transformers", "exact", logged_losses, {"gradient_accumulation_steps": 2}),
    "learning_rate": Effect(1e-3, 1e-2, weights),
    "lr_scheduler_type": Effect("linear", "constant", events),
    "lr_scheduler_kwargs": Effect(None, {"num_cycles": 2.0}, events, {"lr_scheduler_type": "cosine"}),
    "warmup_steps": Effect(0, 0.5, events),
    "warmup_ratio": Effect(None, 0.5, events),
    # Optimizer
    "optim": Effect("adamw_torch", "sgd", weights),
    "optim_args": Effect(None, "momentum=0.9", weights, {"optim": "sgd"}),
    "optim_target_modules": Effect("all-linear", ["query"], projected_weights, {"optim": "galore_adamw"}),
    "weight_decay": Effect(0.0, 0.5, weights),
    "ema_decay": Effect(None, 0.5, weights),
    "ema_use": Effect("both", "evaluate", weights, {"ema_decay": 0.5}),
    "adam_beta1": Effect(0.9, 0.1, weights, ADAM),
    "adam_beta2": Effect(0.999, 0.1, weights, ADAM),
    "adam_epsilon": Effect(1e-8, 1.0, weights, ADAM),
    "gradient_accumulation_steps": Effect(1, 2, steps),
    "global_batch_size": Effect(None, 8, steps),
    "max_grad_norm": Effect(0.0, 0.01, weights, {"optim": "sgd"}),
    "label_smoothing_factor": Effect(0.0, 0.5, weights),
    # Number formats and memory
    "bf16": Effect(False, True, weights),
    "fp16": Effect(False, True, precision_on_a_gpu),
    "bf16_full_eval": Effect(False, True, dtype_in_evaluation),
    "fp16_full_eval": Effect(False, True, dtype_in_evaluation),
    "activation_checkpointing": Effect(False, True, checkpointing_of_layers),
    "activation_checkpointing_kwargs": Effect(
        None, {"use_reentrant": True}, checkpointing_of_layers, {"activation_checkpointing": True}
    ),
    "gradient_checkpointing": Effect(False, True, checkpointing_of_layers),
    "gradient_checkpointing_kwargs": Effect(
        None, {"use_reentrant": True}, checkpointing_of_layers, {"gradient_checkpointing": True}
    ),
    "use_cache": Effect(False, True, cache_in_config),
    "neftune_noise_alpha": Effect(None, 10.0, language_weights),
    # Logs
    "logging_strategy": Effect("steps", "epoch", events, {"logging_steps": 2}),
    "logging_steps": Effect(2, 3, events, {"logging_strategy": "steps"}),
    "logging_first_step": Effect(False, True, events, {"logging_strategy": "steps", "logging_steps": 5}),
    "log_on_each_node": Effect(True, False, in_another_process("should_log")),
    "log_speed": Effect(False, True, events, BY_STEPS),
    "logging_nan_inf_filter": Effect(True, False, logged_losses),
    "include_num_input_tokens_seen": Effect("all", "non_padding", token_logs),
    "log_level": Effect("info", "error", level_of_logger),
    "log_level_replica": Effect("info", "error", level_in_a_replica),
    "disable_tqdm": Effect(False, True, printing_callback),
    # Evaluation
    "eval_strategy": Effect("no", "epoch", events),
    "eval_steps": Effect(2, 3, events, {"eval_strategy": "steps"}),
    "eval_delay": Effect(0, 3, events, EVALUATING),
    "per_device_eval_batch_size": Effect(2, 7, evaluation_batches),
    "prediction_loss_only": Effect(False, True, predictions),
    "eval_on_start": Effect(False, True, events, EVALUATING),
    "eval_do_concat_batches": Effect(True, False, handed_to_metrics),
    "eval_accumulation_steps": Effect(1, 2, moves_to_the_host),
    "include_for_metrics": Effect([], ["loss"], handed_to_metrics),
    "batch_eval_metrics": Effect(False, True, handed_to_metrics),
    "eval_loss_weighting": Effect("batches", "samples", loss_over_unequal_batches),
    # Checkpoints
    "save_only_model": Effect(False, True, files, SAVING),
    "save_strategy": Effect("no", "epoch", files),
    "save_steps": Effect(2, 3, files, {"save_strategy": "steps"}),
    "save_on_each_node": Effect(False, True, in_another_process("should_save")),
    "save_total_limit": Effect(None, 1, files, SAVING),
    "save_total_limit_best": Effect(1, 2, files, {**SAVING, **EVALUATING, "learning_rate": 0.1}),
    "keep_optimizer_states": Effect(None, 1, files, SAVING),
    "load_best_model_at_end": Effect(False, True, last_or_best_weights),
    "metric_for_best_model": Effect("loss", "accuracy", best),
    "greater_is_better": Effect(True, False, best, {"metric_for_best_model": "accuracy"}),
    "ignore_data_skip": Effect(False, True, rows_read_after_resume),
    "restore_callback_states_from_checkpoint": Effect(False, True, patience_after_resume),
    # Seeds and device
    "full_determinism": Effect(False, True, determinism),
    "seed": Effect(1, 2, order),
    "data_seed": Effect(1, 2, order),
    "use_cpu": Effect(False, True, device),
    "accelerator_config": Effect(None, {"use_seedable_sampler": False}, order),
    # Data
    "dataloader_drop_last": Effect(False, True, steps),
    "dataloader_num_workers": Effect(0, 1, training_loader("num_workers")),
    "dataloader_pin_memory": Effect(False, True, pinning_for_a_gpu),
    "dataloader_persistent_workers": Effect(False, True, training_loader("persistent_workers"), WORKERS),
    "dataloader_prefetch_factor": Effect(None, 4, training_loader("prefetch_factor"), WORKERS),
    "dataloader_multiprocessing_context": Effect("fork", "spawn", training_loader("multiprocessing_context"), WORKERS),
    "dataloader_in_order": Effect(True, False, training_loader("in_order"), WORKERS),
    "remove_unused_columns": Effect(True, False, columns_seen),
    "label_names": Effect(None, ["x"], predictions),
    "train_sampling_strategy": Effect("random", "sequential", order),
    "length_column_name": Effect("length", "other", grouped_order),
    # Debugging, scripts, Lightning
    "debug": Effect("", "underflow_overflow", stopped_at_overflow),
    "skip_memory_metrics": Effect(True, False, metrics_about_memory),
    "lightning": Effect(None, {"profiler": "simple"}, lightning_profiler),
    "async_save": Effect(False, True, writing_threads, SAVING),
    "enable_jit_checkpoint": Effect(False, True, files_after_a_signal),
    "jit_checkpoint_signals": Effect("SIGTERM", "SIGUSR1", files_after_a_signal, {"enable_jit_checkpoint": True}),
    **{name: Effect(False, True, kept_for_the_script(name)) for name in ("do_train", "do_eval", "do_predict")},
    "resume_from_checkpoint": Effect(None, "auto", first_step_of_a_second_training),
    "local_rank": Effect(-1, 0, kept_for_the_script("local_rank")),
    "ddp_timeout": Effect(1800, 60, kept_for_the_script("ddp_timeout_delta")),
}

# Argument -> the file and the test that fails when it is ignored.
LIGER = ("training/test_model_preparation.py", "test_the_kernels_that_the_config_names_are_put_into_the_model")
COMPILER = ("strategies/test_model_wrapping.py", "test_naming_a_backend_or_a_mode_compiles_with_them")
TRACKIO = ("tracking/test_trackio.py", "test_arguments_name_the_space_its_bucket_and_the_static_one")
SEEN_ELSEWHERE: dict[str, tuple[str, str]] = {
    "tf32": ("arguments/test_process.py", "test_the_switch_for_tf32_is_set_as_asked_and_by_compilation"),
    "torch_compile": (
        "strategies/test_model_wrapping.py",
        "test_steps_run_the_compiled_model_and_the_users_module_is_what_is_saved",
    ),
    "torch_compile_backend": COMPILER,
    "torch_compile_mode": COMPILER,
    "use_liger_kernel": LIGER,
    "liger_kernel_config": LIGER,
    "torch_empty_cache_steps": (
        "training/test_batch_size_search.py",
        "test_the_cache_is_emptied_in_every_so_many_optimizer_steps",
    ),
    "auto_find_batch_size": (
        "training/test_batch_size_search.py",
        "test_the_size_shrinks_by_a_tenth_until_it_fits_and_is_told",
    ),
    "auto_micro_batch": (
        "training/test_fitting_micro_batches.py",
        "test_no_step_is_lost_and_weights_are_those_of_a_training_that_did_not_run_out",
    ),
    "report_to": ("tracking/test_selection.py", "test_names_become_callbacks_in_their_order_each_once"),
    "run_name": ("tracking/test_as_transformers.py", "test_mlflow"),
    "logging_dir": ("tracking/test_tensorboard.py", "test_the_folder_is_that_of_logging_dir_before_the_environments"),
    "parallelism_config": ("distributed/test_layout.py", "test_ranks_are_those_of_accelerates_mesh"),
    "fsdp": (
        "distributed/test_sharded_training.py",
        "test_each_process_has_half_of_the_parameters_by_layers",
    ),
    "fsdp_config": ("arguments/test_sharding.py", "test_every_key_changes_the_plan"),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        ("strategies/test_data_parallel.py", "test_an_argument_is_a_keyword_of_the_strategy"),
    ),
    "deepspeed": (
        "deepspeed/test_plugin.py",
        "test_a_trainer_shows_the_plugin_where_libraries_look_for_it",
    ),
    "ddp_backend": ("distributed/test_group.py", "test_the_communication_library_fits_the_device"),
    "average_tokens_across_devices": (
        "fidelity/cases/several_processes.py",
        "two_processes_that_count_label_tokens_each_for_itself",
    ),
    "eval_use_gather_object": ("distributed/evaluating_process.py", "objects"),
    "project": TRACKIO,
    "trackio_space_id": TRACKIO,
    "trackio_bucket_id": TRACKIO,
    "trackio_static_space_id": TRACKIO,
    "push_to_hub": ("hub/test_repository.py", "test_without_push_to_hub_nothing_is_asked_of_any_hub"),
    "hub_model_id": ("hub/test_repository.py", "test_hub_model_id_names_the_repository_with_or_without_its_owner"),
    "hub_private_repo": ("hub/test_repository.py", "test_privacy_is_asked_for_only_where_it_is_set"),
    "hub_revision": ("hub/test_repository.py", "test_pushes_go_to_the_branch_of_hub_revision_which_is_made"),
    "hub_token": ("hub/test_repository.py", "test_the_token_that_is_logged_in_is_taken_where_none_is_given"),
    "hub_strategy": ("hub/test_as_transformers.py", "test_commits_and_files_of_a_strategy_are_those_of_transformers"),
    "hub_always_push": (
        "hub/test_pushing.py",
        "test_training_does_not_wait_for_a_push_and_skips_saves_while_one_is_on_its_way",
    ),
}


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.filterwarnings("ignore")
def test_two_values_of_an_argument_differ_in_what_there_is_to_see(tmp_path: Path, name: str) -> None:
    first, second, look, beside = EFFECTS[name]
    seen = []
    for number, value in enumerate((first, second)):
        folder = tmp_path / str(number)
        folder.mkdir()
        seen.append(look(folder, **{**beside, name: value}))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("name", ["learning_rate", "logging_steps", "seed", "save_steps", "eval_do_concat_batches"])
def test_equal_values_look_equal(tmp_path: Path, name: str) -> None:
    first, _, look, beside = EFFECTS[name]
    seen = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        seen.append(look(folder, **{**beside, name: first}))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", SEEN_ELSEWHERE)
def test_the_test_that_sees_an_argument_is_there_and_names_it(name: str) -> None:
    path, function = SEEN_ELSEWHERE[name]
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {function}(" in text and name in text


def test_each_argument_has_its_effect_in_one_of_the_tables() -> None:
    tables = [set(EFFECTS), set(SEEN_ELSEWHERE)]
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set().union(*tables) == fields
    assert sum(map(len, tables)) == len(fields)
