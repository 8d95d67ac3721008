"""Comparison with transformers' Trainer in two processes.

All scenarios of `tests/fidelity` can run in two processes. Selected are the scenarios about several processes, and fast
scenarios of different parts of a training.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.fidelity_process import PLAN
from tests.distributed.process_launch import start_processes
from tests.fidelity.cases import several_processes_data
from tests.fidelity.conftest import RUNS
from tests.fidelity.first_difference import first_difference
from tests.fidelity.record import WITH_CHECKPOINTS, read_record
from tests.fidelity.registry import aspects_of
from tests.fidelity.scenarios import SCENARIOS
from tests.fidelity.side import MODES, ORACLE
from tests.scenarios.once_per_session import run_once

PROCESSES = 2
MAX_RUN_S = 900

# Scenarios for a single process.
IN_BOTH_MODES: tuple[str, ...] = (
    "gpt2_accumulating_4_of_7_batches",
    "training_stopped_in_the_middle_of_a_window",
    "log_evaluation_and_save_asked_for_by_callbacks",
    "best_model_kept_beside_the_two_last",
    "logging_evaluating_and_saving_every_few_steps",
    "events_of_an_early_stop",
    "adapter_and_new_classifier_trained",
    "steps_over_a_stream_that_ends_mid_window",
    "two_train_calls_in_a_row",
    "gradient_checkpointing_that_is_reentrant",
    "dropout_and_batch_norm_with_evaluation_between",
    "partly_frozen_module_with_an_unused_layer",
    "bf16_mixed_precision",
    "resumed_while_accumulating",
)
IN_AUTOMATIC_MODE: tuple[str, ...] = (
    "trainer_that_says_whether_its_loss_is_scaled",
    "metrics_summed_up_batch_by_batch",
    "metrics_from_inputs_and_losses",
    "predicting_a_language_model_of_unequal_lengths",
    "label_smoothing_of_a_causal_model_by_its_window",
    "noise_on_the_embeddings",
    "model_init_trained_twice",
    "decoder_only_model_continuing_its_prompt",
    "tokens_masked_at_random_while_accumulating",
)

IN_PAIRS: tuple[str, ...] = tuple(name for name, scenario in SCENARIOS.items() if scenario.processes == PROCESSES)
# Sharding of data does not depend on the mode.
ABOUT_DATA: tuple[str, ...] = tuple(
    name for name in IN_PAIRS if SCENARIOS[name].run.__module__ == several_processes_data.__name__
)

SELECTED: dict[str, tuple[str, ...]] = {
    ORACLE: (*IN_PAIRS, *IN_BOTH_MODES, *IN_AUTOMATIC_MODE),
    "automatic": (*IN_PAIRS, *IN_BOTH_MODES, *IN_AUTOMATIC_MODE),
    "manual": (*(name for name in IN_PAIRS if name not in ABOUT_DATA), *IN_BOTH_MODES),
}
CASES = [(name, mode) for mode in MODES for name in SELECTED[mode]]

# Aspects that only the first process writes; other records may be complete earlier.
FIRST_PROCESS_ASPECTS = ("files", *WITH_CHECKPOINTS)


def run_both_sides(folder: Path) -> None:
    """Run the scenarios of both sides at once, each in two processes."""
    (folder / PLAN).write_text(json.dumps(SELECTED))
    processes: list[subprocess.Popen[bytes]] = []
    for runs in ([ORACLE], list(MODES)):
        command = [sys.executable, "-m", "tests.distributed.fidelity_process", str(folder), ",".join(runs)]
        processes += start_processes(command, folder, label=f"-{runs[0]}-")[0]
    try:
        for process in processes:
            process.wait(MAX_RUN_S)
    except subprocess.TimeoutExpired:
        # Missing records fail below.
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the records of each run and rank."""
    return run_once(tmp_path_factory, "fidelity-in-two-processes", run_both_sides)


def select_aspects(name: str, rank: int) -> list[str]:
    return [aspect for aspect in aspects_of(SCENARIOS[name]) if rank == 0 or aspect not in FIRST_PROCESS_ASPECTS]


@pytest.mark.parametrize("rank", range(PROCESSES))
@pytest.mark.parametrize(("name", "mode"), CASES, ids=["-".join(case) for case in CASES])
def test_each_process_has_the_same_record_as_with_transformers(folder: Path, name: str, mode: str, rank: int) -> None:
    expected, actual = (read_record(folder / run / f"rank{rank}", name) for run in (ORACLE, mode))
    for run, record in ((ORACLE, expected), (mode, actual)):
        if record.error:
            pytest.fail(f"{name} raised with {run} on rank {rank}:\n{record.error}", pytrace=False)
    for aspect in select_aspects(name, rank):
        difference = first_difference(getattr(expected, aspect), getattr(actual, aspect))
        if difference:
            pytest.fail(f"{name} ({mode}), rank {rank}, {aspect}{difference}", pytrace=False)


def test_both_modes_run_in_two_processes(folder: Path) -> None:
    for mode in MODES:
        for rank in range(PROCESSES):
            record = read_record(folder / mode / f"rank{rank}", IN_BOTH_MODES[0])
            assert record.automatic_optimization is (mode == "automatic")
    assert set(RUNS) == {ORACLE, *MODES} and "WORLD_SIZE" not in os.environ
