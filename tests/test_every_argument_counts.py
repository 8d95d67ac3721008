"""Every argument has an effect.

`EFFECTS` contains for each argument two values and an observation that differs. Arguments without effect in a short run
on a CPU are in `TESTED_ELSEWHERE`, with the test that fails if the argument is ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from littrainer import TrainerCallback, TrainingArguments
from littrainer.evaluation.gathering import BatchCollection
from littrainer.lightning_adapter.lightning_trainer import lightning_keywords
from tests.scenarios.data import Rows, token_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_gpt2
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

ROOT = Path(__file__).parent


# ---- Observations: functions of a folder and arguments -------------------------------------------------------------


def weights(folder: Path, **changes: Any) -> Any:
    """Return the weights after a training."""
    trainer = quiet_trainer(folder, **changes)
    trainer.train()
    return [weight.tolist() for weight in trainer.model.state_dict().values()]


def steps(folder: Path, **changes: Any) -> Any:
    """Return the number of optimizer steps of a training."""
    trainer = quiet_trainer(folder, **changes)
    trainer.train()
    return trainer.state.global_step


class Observer(TrainerCallback):
    """A callback that records optimizer step and learning rate of each event."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("rate", kwargs["lr_scheduler"].get_last_lr()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.events.append(("log", state.global_step, sorted(logs)))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("save", state.global_step))


def events(folder: Path, model: Any = None, trainer_kwargs: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Return logs, evaluations, saves and learning rates of a training."""
    observer = Observer()
    trainer = quiet_trainer(
        folder, model, trainer_kwargs={"callbacks": [observer], **(trainer_kwargs or {})}, **changes
    )
    trainer.train()
    return observer.events


def files(folder: Path, **changes: Any) -> Any:
    """Return the files of a training."""
    trainer = quiet_trainer(folder / "run", **changes)
    trainer.train()
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def training_loader(name: str) -> Callable[..., Any]:
    """Return a function that returns an attribute of the training DataLoader."""

    def observe(folder: Path, **changes: Any) -> Any:
        return str(getattr(quiet_trainer(folder, **changes).get_train_dataloader(), name))

    return observe


def pinning_for_a_gpu(folder: Path, **changes: Any) -> Any:
    """Return whether batches for a GPU are loaded into page-locked memory."""
    trainer = quiet_trainer(folder, **changes)
    trainer.args.dataloader_pin_memory = changes["dataloader_pin_memory"]
    trainer.args.device = torch.device("cuda")
    return trainer.get_train_dataloader().pin_memory


def order(folder: Path, rows: Any = None, **changes: Any) -> Any:
    """Return the first values of the training samples in their order."""
    trainer = quiet_trainer(folder, trainer_kwargs={"train_dataset": Rows(rows or vector_rows(10))}, **changes)
    loader = trainer.get_train_dataloader()
    loader.set_epoch(1)
    return [batch["x"][:, 0].tolist() for batch in loader]


def evaluation_batches(folder: Path, **changes: Any) -> Any:
    """Return the number of batches of an evaluation."""
    return len(quiet_trainer(folder, **changes).get_eval_dataloader())


def moves_to_the_host(folder: Path, **changes: Any) -> Any:
    """Return how often an evaluation moves predictions to host memory."""
    moves: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchCollection, "move_to_host", lambda collection: moves.append(collection))
        quiet_trainer(folder, **changes).predict(Rows(vector_rows(9)))
    return len(moves)


def precision_on_a_gpu(folder: Path, **changes: Any) -> Any:
    """Return Lightning's precision on a machine with a GPU."""
    args = quiet_arguments(folder, **changes)
    args.device = torch.device("cuda")
    return lightning_keywords(args)["precision"]


def checkpointing_of_layers(folder: Path, **changes: Any) -> Any:
    """Return the keywords of `gradient_checkpointing_enable`."""
    model = tiny_gpt2()
    calls: list[Any] = []
    original = model.gradient_checkpointing_enable

    def enable(gradient_checkpointing_kwargs: Any = None, **keywords: Any) -> None:
        calls.append(gradient_checkpointing_kwargs)
        original(gradient_checkpointing_kwargs)

    model.gradient_checkpointing_enable = enable
    rows = Rows([{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in token_rows(2, longest=3)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(folder, model, trainer_kwargs={"train_dataset": rows}, max_steps=1, **changes).train()
    return calls


def cache_in_config(folder: Path, **changes: Any) -> Any:
    """Return `use_cache` of the model's configuration."""
    model = tiny_gpt2()
    quiet_trainer(folder, model, **changes)
    return model.config.use_cache


def device(folder: Path, **changes: Any) -> Any:
    """Return the device on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        return quiet_arguments(folder, **changes)._find_device().type


def stopped_at_overflow(folder: Path, **changes: Any) -> Any:
    """Return whether a training stops at a non-finite number."""
    model = VectorClassifier()
    model.norm.weight.data[2] = float("inf")
    trainer = quiet_trainer(folder, model, max_steps=1, **changes)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            trainer.train()
        except ValueError:
            return True
    return False


def script_argument(name: str) -> Callable[..., Any]:
    """Return a function that returns an argument for scripts."""

    def observe(folder: Path, **changes: Any) -> Any:
        return getattr(quiet_arguments(folder, **changes), name)

    return observe


# ---- The tables ----------------------------------------------------------------------------------------------------


class Effect(NamedTuple):
    """The effect of an argument.

    Parameters:
        first, second: values of the argument.
        observe: takes a folder and arguments, returns an observation that differs between the values.
        further: other arguments for both values.
    """

    first: Any
    second: Any
    observe: Callable[..., Any]
    further: dict[str, Any] = {}  # noqa: RUF012


BY_STEPS = {"logging_strategy": "steps", "logging_steps": 1}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
SAVING = {"save_strategy": "steps", "save_steps": 2}
ADAM = {"optim": "adamw_torch"}
WORKERS = {"dataloader_num_workers": 1}

EFFECTS: dict[str, Effect] = {
    # Schedule and length of the run
    "per_device_train_batch_size": Effect(2, 4, steps),
    "num_train_epochs": Effect(1, 1.5, steps),
    "max_steps": Effect(1, 2, steps),
    "save_minutes": Effect(None, 0, files),
    "eval_minutes": Effect(None, 0, events),
    "max_minutes": Effect(None, 0, steps),
    "on_nonfinite": Effect("warn", "rollback", files, SAVING),
    "spike_factor": Effect(None, 1, weights, {"on_nonfinite": "skip", "max_steps": 25}),
    "learning_rate": Effect(1e-3, 1e-2, weights),
    "lr_scheduler_type": Effect("linear", "constant", events),
    "lr_scheduler_kwargs": Effect(None, {"num_cycles": 2.0}, events, {"lr_scheduler_type": "cosine"}),
    "warmup_steps": Effect(0, 0.5, events),
    "warmup_ratio": Effect(None, 0.5, events),
    # Optimizer
    "optim": Effect("adamw_torch", "sgd", weights),
    "optim_args": Effect(None, "momentum=0.9", weights, {"optim": "sgd"}),
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
    "activation_checkpointing": Effect(False, True, checkpointing_of_layers),
    "activation_checkpointing_kwargs": Effect(
        None, {"use_reentrant": True}, checkpointing_of_layers, {"activation_checkpointing": True}
    ),
    "gradient_checkpointing": Effect(False, True, checkpointing_of_layers),
    "gradient_checkpointing_kwargs": Effect(
        None, {"use_reentrant": True}, checkpointing_of_layers, {"gradient_checkpointing": True}
    ),
    "use_cache": Effect(False, True, cache_in_config),
    # Logs
    "logging_strategy": Effect("steps", "epoch", events, {"logging_steps": 2}),
    "logging_steps": Effect(2, 3, events, {"logging_strategy": "steps"}),
    "logging_first_step": Effect(False, True, events, {"logging_strategy": "steps", "logging_steps": 5}),
    "log_speed": Effect(False, True, events, BY_STEPS),
    # Evaluation
    "eval_strategy": Effect("no", "epoch", events),
    "eval_steps": Effect(2, 3, events, {"eval_strategy": "steps"}),
    "eval_delay": Effect(0, 3, events, EVALUATING),
    "per_device_eval_batch_size": Effect(2, 7, evaluation_batches),
    "eval_on_start": Effect(False, True, events, EVALUATING),
    "eval_at_end": Effect(False, True, events),
    "eval_accumulation_steps": Effect(1, 2, moves_to_the_host),
    # Checkpoints
    "save_only_model": Effect(False, True, files, SAVING),
    "save_strategy": Effect("no", "epoch", files),
    "save_steps": Effect(2, 3, files, {"save_strategy": "steps"}),
    "save_total_limit": Effect(None, 1, files, SAVING),
    "save_total_limit_best": Effect(1, 2, files, {**SAVING, **EVALUATING, "learning_rate": 0.1}),
    "keep_optimizer_states": Effect(None, 1, files, SAVING),
    # Seeds and device
    "seed": Effect(1, 2, order),
    "data_seed": Effect(1, 2, order),
    "accelerator_config": Effect(None, {"use_seedable_sampler": False}, order),
    # Data
    "dataloader_drop_last": Effect(False, True, steps),
    "dataloader_num_workers": Effect(0, 1, training_loader("num_workers")),
    "dataloader_pin_memory": Effect(False, True, pinning_for_a_gpu),
    "dataloader_persistent_workers": Effect(False, True, training_loader("persistent_workers"), WORKERS),
    "dataloader_prefetch_factor": Effect(None, 4, training_loader("prefetch_factor"), WORKERS),
    "dataloader_multiprocessing_context": Effect("fork", "spawn", training_loader("multiprocessing_context"), WORKERS),
    "dataloader_in_order": Effect(True, False, training_loader("in_order"), WORKERS),
    "train_sampling_strategy": Effect("random", "sequential", order),
    # Debugging, scripts, Lightning
    "debug": Effect("", "underflow_overflow", stopped_at_overflow),
    **{name: Effect(False, True, script_argument(name)) for name in ("do_train", "do_eval", "do_predict")},
    "local_rank": Effect(-1, 0, script_argument("local_rank")),
    "ddp_timeout": Effect(1800, 60, script_argument("ddp_timeout_delta")),
}

# Argument -> the test or scenario that fails if it is ignored.
TESTED_ELSEWHERE: dict[str, str] = {
    "tf32": "arguments/test_process.py::test_the_switch_for_tf32_is_set_as_asked_and_by_compilation",
    "torch_compile": (
        "strategies/test_model_wrapping.py::test_steps_run_the_compiled_model_and_the_users_module_is_what_is_saved"
    ),
    "torch_compile_backend": "strategies/test_model_wrapping.py::test_naming_a_backend_or_a_mode_compiles_with_them",
    "torch_compile_mode": "strategies/test_model_wrapping.py::test_naming_a_backend_or_a_mode_compiles_with_them",
    "use_liger_kernel": (
        "loop/test_model_preparation.py::test_the_kernels_that_the_config_names_are_put_into_the_model"
    ),
    "liger_kernel_config": (
        "loop/test_model_preparation.py::test_the_kernels_that_the_config_names_are_put_into_the_model"
    ),
    "torch_empty_cache_steps": (
        "loop/test_out_of_memory.py::test_the_cache_is_emptied_in_every_so_many_optimizer_steps"
    ),
    "auto_find_batch_size": (
        "loop/test_out_of_memory.py::test_the_batch_size_shrinks_by_a_tenth_until_it_fits_with_a_warning"
    ),
    "auto_micro_batch": (
        "loop/test_micro_batch_splitter.py::test_no_step_is_lost_and_weights_are_those_of_a_training_that_did_not_run_out"
    ),
    "report_to": "tracking/test_selection.py::test_names_become_callbacks_in_their_order_each_once",
    "run_name": "tracking/test_as_transformers.py::test_mlflow",
    "logging_dir": "tracking/test_tensorboard.py::test_the_folder_is_that_of_logging_dir_before_the_environments",
    "parallelism_config": "distributed/test_layout.py::test_ranks_are_those_of_accelerates_mesh",
    "fsdp": "distributed/test_sharded_training.py::test_each_process_has_half_of_the_parameters_by_layers",
    "fsdp_config": "arguments/test_sharding.py::test_every_key_changes_the_plan",
    "ddp_find_unused_parameters": "strategies/test_data_parallel.py::test_an_argument_is_a_keyword_of_the_strategy",
    "ddp_bucket_cap_mb": "strategies/test_data_parallel.py::test_an_argument_is_a_keyword_of_the_strategy",
    "ddp_broadcast_buffers": "strategies/test_data_parallel.py::test_an_argument_is_a_keyword_of_the_strategy",
    "ddp_static_graph": "strategies/test_data_parallel.py::test_an_argument_is_a_keyword_of_the_strategy",
    "deepspeed": "deepspeed/test_plugin.py::test_a_trainer_shows_the_plugin_where_libraries_look_for_it",
    "ddp_backend": "distributed/test_group.py::test_the_communication_library_fits_the_device",
    "average_tokens_across_devices": (
        "fidelity/cases/several_processes.py::two_processes_that_count_label_tokens_each_for_itself"
    ),
    "eval_use_gather_object": "distributed/evaluating_process.py::collect_objects",
    "project": "tracking/test_trackio.py::test_arguments_name_the_space_its_bucket_and_the_static_one",
    "trackio_space_id": "tracking/test_trackio.py::test_arguments_name_the_space_its_bucket_and_the_static_one",
    "trackio_bucket_id": "tracking/test_trackio.py::test_arguments_name_the_space_its_bucket_and_the_static_one",
    "trackio_static_space_id": "tracking/test_trackio.py::test_arguments_name_the_space_its_bucket_and_the_static_one",
    "push_to_hub": "hub/test_repository.py::test_without_push_to_hub_no_request_is_sent",
    "hub_model_id": "hub/test_repository.py::test_hub_model_id_names_the_repository_with_or_without_its_owner",
    "hub_private_repo": "hub/test_repository.py::test_privacy_is_requested_only_if_it_is_set",
    "hub_revision": "hub/test_repository.py::test_pushes_create_and_update_the_branch_of_hub_revision",
    "hub_token": "hub/test_repository.py::test_the_logged_in_token_is_the_default",
    "hub_strategy": "hub/test_as_transformers.py::test_commits_and_files_of_a_strategy_are_those_of_transformers",
    "hub_always_push": ("hub/test_pushing.py::test_training_does_not_wait_for_a_push_and_skips_saves_while_it_runs"),
    "output_dir": "loop/test_run.py::test_the_folder_follows_an_output_dir_that_a_callback_sets",
    "hang_timeout": (
        "loop/test_watchdog.py::test_the_command_line_overrides_the_argument_and_without_both_nothing_is_watched"
    ),
    "max_tokens_per_batch": "data/test_token_batches.py::test_steps_and_samples_are_planned",
    "pack_to_length": "data/test_packing.py::test_each_document_is_packed_once_and_rows_are_shuffled_in_each_epoch",
    "optim_target_modules": "optim/test_third_party.py::test_the_weights_of_the_named_linear_layers_are_projected",
    "bf16_full_eval": "fidelity/cases/precision.py::bf16_full_evaluation_after_training",
    "fp16_full_eval": "fidelity/cases/precision.py::fp16_full_evaluation_before_training",
    "neftune_noise_alpha": "fidelity/cases/model_side.py::noise_on_the_embeddings",
    "log_on_each_node": "arguments/test_process.py::test_ranks_come_from_the_launchers_environment",
    "log_level_replica": "arguments/test_process.py::test_ranks_come_from_the_launchers_environment",
    "save_on_each_node": "arguments/test_process.py::test_ranks_come_from_the_launchers_environment",
    "log_level": "arguments/test_process.py::test_the_log_level_is_the_number_that_transformers_gives",
    "include_num_input_tokens_seen": "fidelity/cases/reports.py::input_tokens_without_padding_by_the_tokenizer",
    "disable_tqdm": "callbacks/test_progress.py::test_bars_are_drawn_on_a_terminal_or_where_a_script_asked_for_them",
    "logging_nan_inf_filter": "fidelity/cases/callbacks.py::loss_that_is_nan_once_and_logged",
    "chunked_loss": "loop/test_chunked_loss.py::test_losses_and_gradients_are_those_of_all_logits",
    "log_loss_terms": "loop/test_tracked_means.py::test_terms_of_a_model_are_logged_as_means_over_micro_batches",
    "loss_normalization": "loop/test_loss_normalization.py::test_losses_and_weights_are_the_same_for_each_layout",
    "prediction_loss_only": "fidelity/cases/evaluation.py::evaluating_the_loss_only",
    "eval_do_concat_batches": "fidelity/cases/evaluation.py::predictions_as_lists_of_batches",
    "include_for_metrics": "fidelity/cases/evaluation.py::metrics_from_inputs_and_losses",
    "batch_eval_metrics": "fidelity/cases/evaluation.py::metrics_summed_up_batch_by_batch",
    "eval_loss_weighting": "evaluation/test_loss_mean.py::test_uncountable_labels_are_weighted_by_samples",
    "load_best_model_at_end": "fidelity/cases/best_model.py::best_model_by_loss_where_no_metric_is_named",
    "metric_for_best_model": "fidelity/cases/best_model.py::best_model_by_loss_where_no_metric_is_named",
    "greater_is_better": "fidelity/cases/best_model.py::best_model_is_the_one_with_the_smallest_value",
    "ignore_data_skip": "fidelity/cases/resume.py::resumed_without_skipping_data",
    "restore_callback_states_from_checkpoint": "fidelity/cases/resume_changed.py::resumed_with_fresh_patience",
    "full_determinism": "fidelity/cases/model_side.py::full_determinism",
    "use_cpu": "arguments/test_process.py::test_each_process_has_the_gpu_of_its_number_before_metal_and_the_cpu",
    "remove_unused_columns": "test_trainer.py::test_columns_the_model_does_not_take_are_removed_from_a_table",
    "signature_columns": "data/test_columns.py::test_signature_columns_names_the_columns_to_keep",
    "label_names": "fidelity/cases/evaluation_outputs.py::labels_of_several_names",
    "length_column_name": "fidelity/cases/sampling.py::grouped_by_a_column_of_lengths",
    "skip_memory_metrics": "fidelity/cases/model_side.py::memory_metrics",
    "lightning": "lightning_adapter/test_run_lightning.py::test_keywords_of_the_users_own_reach_lightning",
    "async_save": (
        "checkpoint/test_async_save.py::test_steps_go_on_while_a_checkpoint_is_written_and_it_shows_when_it_is_complete"
    ),
    "enable_jit_checkpoint": (
        "faults/test_preemption.py::test_without_enable_jit_checkpoint_signals_do_what_they_did_before_training"
    ),
    "jit_checkpoint_signals": "faults/test_preemption.py::test_jit_checkpoint_signals_says_which_signals_save",
    "resume_from_checkpoint": ("loop/test_resuming.py::test_auto_resumes_from_the_newest_intact_checkpoint"),
}


def observe_with(name: str, value: Any, folder: Path) -> Any:
    folder.mkdir()
    return EFFECTS[name].observe(folder, **{**EFFECTS[name].further, name: value})


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.filterwarnings("ignore")
def test_two_values_of_an_argument_have_different_effects(tmp_path: Path, name: str) -> None:
    first, second, *_ = EFFECTS[name]
    assert observe_with(name, first, tmp_path / "first") != observe_with(name, second, tmp_path / "second")


@pytest.mark.parametrize("name", ["learning_rate", "logging_steps", "seed", "save_steps"])
def test_equal_values_have_equal_effects(tmp_path: Path, name: str) -> None:
    first = EFFECTS[name].first
    assert observe_with(name, first, tmp_path / "once") == observe_with(name, first, tmp_path / "twice")


@pytest.mark.parametrize("name", TESTED_ELSEWHERE)
def test_the_test_of_an_argument_exists_and_names_the_argument(name: str) -> None:
    path, _, function = TESTED_ELSEWHERE[name].partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    # A scenario is a function or an entry of a dict.
    assert (f"def {function}(" in text or f'"{function}": ' in text) and name in text


def test_each_argument_has_an_entry_in_exactly_one_table() -> None:
    tables = [set(EFFECTS), set(TESTED_ELSEWHERE)]
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set().union(*tables) == fields
    assert sum(map(len, tables)) == len(fields)
