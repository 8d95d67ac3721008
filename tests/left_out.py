"""Files, folders and tests below `tests/` that `make test` leaves out and `make test-all` runs.

Of `fidelity/test_fidelity.py`, `make test` runs what `QUICK` in `tests/fidelity/scenarios.py` says, and twenty of these
scenarios on a simulated GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

FOR_WHAT_THEY_WOULD_INSTALL = ("libraries", "search/test_ray_backend.py")

# `littrainer verify` starts the script with each Trainer.
IN_PROCESSES = (
    "is_equal_bit_for_bit_and_leaves_the_users_folder_alone",
    "with_a_planted_difference_is_told_its_step_and_cause",
    "that_cannot_be_verified_says_on_which_side_and_why",
)

OF_RANDOM_FAULTS = (
    "runs_with_faults_end_with_the_weights_of_runs_without",
    "nonfinite_numbers_are_reported_at_the_next_log_and_rolled_back_exactly",
    "each_row_is_trained_once_whatever_the_layouts_of_the_parts",
    "a_run_at_an_unreliable_url_resumes_exactly_or_names_the_url",
)

# Tests of more than five seconds, most of which start processes. Other tests cover the same:
# two processes by distributed/test_precision_across_processes.py, a kill by faults/test_random_faults.py, numbers
# that go wrong by loop/test_health.py.
FOR_THEIR_TIME = (
    "check/test_late_failures.py",
    "checkpoint/test_exchange.py",
    "checkpoint/test_fsspec_releases.py",
    "compat/test_console.py",
    "redirection/test_redirect.py::test_every_way_to_the_trainer_api_ends_in_littrainer",
    "compat/test_releases.py",
    "distributed/test_data_across_processes.py",
    "distributed/test_data_parallel.py",
    "distributed/test_evaluation_across_processes.py",
    "distributed/test_fidelity_in_two_processes.py",
    "distributed/test_saving_together.py",
    "distributed/test_distributed_search.py",
    "distributed/test_restarts.py",
    "distributed/test_sequence_parallel_across_processes.py",
    "distributed/test_sharded_training.py",
    "distributed/test_starting.py",
    "distributed/test_tensor_parallel_across_processes.py",
    "docs/test_page_run.py",
    "docs/test_pages.py",
    "examples",
    "commands/test_check.py::test_a_script_that_never_trains_ends_with_one_line_or_by_itself",
    "commands/test_check.py::test_a_training_of_two_processes_is_checked_in_two",
    "commands/test_check.py::test_a_child_process_does_not_train",
    "commands/test_explain.py::test_a_script_without_a_trainer_ends_with_one_line_or_by_itself",
    *(f"commands/test_verify.py::test_a_script_{name}" for name in IN_PROCESSES),
    "commands/test_check.py::test_a_script_that_saves_or_trains_on_its_way_out_leaves_nothing",
    "data/test_packing.py::test_flex_attention_separates_documents",
    "faults/test_interrupts.py::test_a_script_that_is_interrupted_ends_as_python_does_whatever_it_was_doing",
    *(f"faults/test_random_faults.py::test_{name}" for name in OF_RANDOM_FAULTS),
    "hub/test_ending_by_errors.py",
    "hub/test_pushing_together.py",
    "packaging",
    "lightning_users/test_two_processes.py",
    "search/test_callbacks_over_trials.py",
    "search/test_trial_processes.py",
    "search/test_trial.py::test_twenty_trials_end_with_the_memory_of_a_single_trial",
    "search/test_wandb_sweep.py",
    "simulated_gpu/test_gpu_trainings.py",
    "simulated_gpu/test_memory.py",
    "simulated_gpu/test_several_gpus.py",
    "simulated_gpu/test_waits.py",
    "test_accepted_arguments.py",
    "test_benchmarks.py",
    "fidelity/test_heads.py",
    "lightning_adapter/test_run_lightning.py::test_a_run_writes_nothing_of_lightnings_to_the_terminal_or_the_disk",
    "runtime/test_log_levels.py::test_a_default_script_gets_the_logs_and_a_single_warning",
    "tracking/services",
    "tracking/test_transformers_callbacks.py::test_under_the_redirection_the_classes_derive_from_transformers_own",
    "tracking/test_trials.py",
    "loop/test_health.py::test_many_batches_can_be_skipped_between_two_checkpoints",
    "loop/test_preemption.py::test_ctrl_c_ends_all_processes_in_two_lines_and_with_status_130",
    "loop/test_reports.py::test_allocated_and_peak_memory_of_a_stage_are_separate",
)

LEFT_OUT = frozenset(FOR_WHAT_THEY_WOULD_INSTALL + FOR_THEIR_TIME)


def leave_out(config: pytest.Config, items: list[pytest.Item], is_left_out: Callable[[pytest.Item], bool]) -> None:
    """Take tests out of those that were collected, and have them counted."""
    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
