"""Processes that share rows, by sequence or context parallelism, have the results of a single process."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import sequence_parallel_process
from tests.distributed.process_launch import run_in_processes
from tests.distributed.sequence_parallel_process import EVALUATED_ROWS, IN_FOUR, IN_TWO, curve, make_sharing_trainer
from tests.distributed.tensor_parallel_process import llama
from tests.scenarios.once_per_session import run_once

TOLERANCE = 1e-5
CHECKS = {2: IN_TWO, 4: IN_FOUR}
CASES = [(processes, name) for processes, checks in CHECKS.items() for name in checks]
PHASES = [case for case in CASES if case[1].startswith("all phases")]
Results = Callable[[int, str], tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of trainings in two and in four processes, and of the same trainings in a single process."""

    def run(folder: Path) -> None:
        for processes, checks in CHECKS.items():
            shared, single = folder / f"{processes}", folder / f"single-{processes}"
            shared.mkdir()
            single.mkdir()
            run_in_processes(sequence_parallel_process.__name__, shared, processes=processes)
            sequence_parallel_process.main(single, checks)

    return run_once(tmp_path_factory, "sequence-parallel", run)


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Return a function that returns the results of a single process, and of each of several."""

    def read(processes: int, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        files = [folder / f"single-{processes}" / "0.pickle"]
        files += [folder / f"{processes}" / f"{rank}.pickle" for rank in range(processes)]
        single, *shared = (pickle.loads(file.read_bytes())[name] for file in files)
        return single, shared

    return read


@pytest.mark.parametrize(("processes", "name"), CASES)
def test_losses_and_gradients_equal_those_of_a_single_process(results: Results, processes: int, name: str) -> None:
    single, shared = results(processes, name)
    assert len(single["curve"]) >= 2 and single["gradients"]
    for result in shared:
        np.testing.assert_allclose(result["curve"], single["curve"], rtol=0, atol=TOLERANCE)
        for parameter, gradient in single["gradients"].items():
            np.testing.assert_allclose(result["gradients"][parameter], gradient, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(result["evaluated"], single["evaluated"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("processes", "name"), PHASES)
def test_evaluations_predictions_and_generated_texts_equal_those_of_a_single_process(
    results: Results, processes: int, name: str
) -> None:
    single, shared = results(processes, name)
    assert single["metrics"]["eval_rows"] == EVALUATED_ROWS
    for result in shared:
        for key in ("first", "metrics"):
            assert result[key] == pytest.approx(single[key], rel=TOLERANCE)
        assert result["predictions"].shape == single["predictions"].shape
        # Padding of rows differs between processes with different rows.
        is_real = (single["predictions"] != -100) & (result["predictions"] != -100)
        np.testing.assert_allclose(result["predictions"][is_real], single["predictions"][is_real], atol=TOLERANCE)
        assert result["generated"] == single["generated"]


@pytest.mark.parametrize(("processes", "name"), PHASES)
def test_processes_that_share_rows_count_once_and_leave_the_model_as_it_was(
    results: Results, processes: int, name: str
) -> None:
    single, shared = results(processes, name)
    for result in shared:
        assert result["total batch"] == single["total batch"]
        assert result["sizes"] == ((1, 2, 1) if "contexts" in name else (2, 1, 1))
        assert result["sequences"] is None
        if processes == 2:
            assert (result["counts"], result["hooks"]) == (single["counts"], 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("length", r"rows of \d+ positions, and sp_handler has sp_seq_length=5, which is not variable"),
        ("heads", "2 does not divide the num_key_value_heads=1 of LlamaForCausalLM.*Use cp_size"),
        ("flex contexts", "for eager and sdpa attention, and LlamaForCausalLM has flex_attention.*Use sp_size"),
        (
            "rolling",
            "of RollingForCausalLM would differ.*more than its attention functions combines",
        ),
        ("argument", "cp_size=2 is not possible: neftune_noise_alpha"),
        ("rows", "neighbouring processes share rows, and the first batch differs"),
        ("images", r"pixel_values has the shape \(4, 3\)\. Leave pixel_values out"),
    ],
)
def test_what_processes_cannot_share_is_refused_before_the_first_step(folder: Path, name: str, message: str) -> None:
    for rank in range(2):
        errors = pickle.loads((folder / "2" / f"{rank}.pickle").read_bytes())["refused"]
        assert re.search(message, errors[name])


@pytest.mark.parametrize(("processes", "name"), PHASES)
def test_trainings_resume_in_any_number_of_processes(
    folder: Path, results: Results, tmp_path: Path, processes: int, name: str
) -> None:
    single, shared = results(processes, name)
    for result in shared:
        np.testing.assert_allclose(result["resumed"], result["curve"], rtol=0, atol=TOLERANCE)
    alone = make_sharing_trainer(tmp_path, llama(num_key_value_heads=4), {}, max_steps=3)
    alone.train(resume_from_checkpoint=str(folder / f"{processes}" / name.replace(" ", "-") / "run" / "checkpoint-2"))
    np.testing.assert_allclose(curve(alone), single["curve"], rtol=0, atol=TOLERANCE)
