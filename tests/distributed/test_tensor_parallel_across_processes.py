"""Tensor parallelism in several processes has the results of a single process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import tensor_parallel_process
from tests.distributed.process_launch import run_in_processes
from tests.distributed.tensor_parallel_process import (
    CHECKS,
    EVALUATED_ROWS,
    curve,
    llama,
    make_planned_trainer,
    make_trainer,
    train_replicas,
)
from tests.scenarios.once_per_session import run_once

TOLERANCE = 1e-6
CURVES = [name for name in CHECKS if name not in ("loaded split", "streamed")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of trainings in a single process and in two."""

    def run(folder: Path) -> None:
        for name in ("single", "pair"):
            (folder / name).mkdir()
        run_in_processes(tensor_parallel_process.__name__, folder / "pair")
        tensor_parallel_process.main(folder / "single")

    return run_once(tmp_path_factory, "tensor-parallel", run)


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of a single process, and of each of two processes."""
    files = [folder / "single" / "0.pickle", *(folder / "pair" / f"{rank}.pickle" for rank in range(2))]
    return [pickle.loads(file.read_bytes()) for file in files]


def assert_equal_curves(curves: list[Any]) -> None:
    first, *others = map(np.array, curves)
    assert first.shape == (4, 2)
    for values in others:
        assert np.abs(values - first).max() < TOLERANCE


@pytest.mark.parametrize("name", CURVES)
def test_losses_and_gradient_norms_equal_those_of_a_single_process(results: list[dict[str, Any]], name: str) -> None:
    assert_equal_curves([result[name]["curve"] if name == "by plan" else result[name] for result in results])


def test_the_layers_of_the_plan_are_sharded_and_the_processes_count_once(results: list[dict[str, Any]]) -> None:
    single, *pair = (result["by plan"] for result in results)
    assert (single["split"], single["sizes"]) == ([], (1, 1))
    for result in pair:
        assert len(result["split"]) == 16 and not any("norm" in name for name in result["split"])
        assert result["sizes"] == (2, 1)
        for name in ("total batch", "tokens", "flos"):
            assert result[name] == single[name]


def test_evaluations_count_each_sample_once(results: list[dict[str, Any]]) -> None:
    single, *pair = (result["by plan"] for result in results)
    for result in pair:
        assert result["metrics"]["eval_rows"] == EVALUATED_ROWS
        assert result["metrics"] == pytest.approx(single["metrics"], rel=TOLERANCE)
        assert result["predictions"].shape == single["predictions"].shape
        assert np.allclose(result["predictions"], single["predictions"], atol=TOLERANCE)
    single, *pair = (result["streamed"] for result in results)
    assert pair == [pytest.approx(single)] * 2


def test_generation_and_a_resumed_training_equal_those_of_a_single_process(
    results: list[dict[str, Any]],
) -> None:
    assert len({str(result["by plan"]["generated"]) for result in results}) == 1
    for result in results:
        resumed, uninterrupted = (np.array(result["by plan"][name]) for name in ("resumed", "curve"))
        assert np.abs(resumed - uninterrupted).max() < TOLERANCE


def test_saved_models_are_complete(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    for path in ("by-plan/saved", "by-plan/run/checkpoint-4"):
        single, pair = (
            AutoModelForCausalLM.from_pretrained(folder / name / path).state_dict() for name in ("single", "pair")
        )
        assert set(single) == set(pair)
        for name, weights in single.items():
            # Adam amplifies rounding of gradients near 0.
            torch.testing.assert_close(pair[name], weights, rtol=0, atol=1e-4)


def test_a_single_process_resumes_a_checkpoint_of_two(
    folder: Path, results: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, llama())
    trainer.train(resume_from_checkpoint=str(folder / "pair" / "by-plan" / "run" / "checkpoint-2"))
    assert_equal_curves([results[0]["by plan"]["curve"], curve(trainer)])


def test_a_single_process_resumes_groups_with_sharded_and_replicated_parameters(
    folder: Path, results: list[dict[str, Any]], tmp_path: Path
) -> None:
    checkpoints = [folder / name / "plain-module" / "checkpoint-2" for name in ("single", "pair")]
    single, pair = (torch.load(checkpoint / "optimizer.pt", weights_only=True) for checkpoint in checkpoints)
    assert pair["param_groups"] == single["param_groups"]
    for param_id, entries in single["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(pair["state"][param_id][key], value, rtol=0, atol=TOLERANCE)
    trainer = make_planned_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=str(checkpoints[1]))
    # Dropout depends on the number of processes.
    assert curve(trainer)[:2] == results[1]["plain module"][:2] and len(curve(trainer)) == 4


def test_a_model_that_transformers_has_sharded_has_the_same_results(results: list[dict[str, Any]]) -> None:
    single, *pair = (result["loaded split"] for result in results)
    assert_equal_curves([result["loaded split"]["curve"] for result in results])
    for result in pair:
        assert result["sizes"] == (2, 1)
        assert result["loss"] == pytest.approx(single["loss"], abs=TOLERANCE)
        assert np.allclose(result["gradient"], single["gradient"], atol=TOLERANCE)
    # Sharding by transformers and by the plan is the same.
    for rank in (1, 2):
        assert_equal_curves([results[rank]["by plan"]["curve"], results[rank]["loaded split"]["curve"]])


def test_four_processes_train_two_replicas_of_a_sharded_model_and_resume_exactly(tmp_path: Path) -> None:
    run_in_processes(tensor_parallel_process.__name__, tmp_path, processes=4)
    single = train_replicas(tmp_path / "single")
    for rank in range(4):
        result = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())["replicas"]
        assert np.abs(np.array(result["curve"]) - np.array(single["curve"])).max() < TOLERANCE
        assert np.abs(np.array(result["resumed"]) - np.array(result["curve"])).max() < TOLERANCE
        assert (len(result["curve"]), result["rows"]) == (3, EVALUATED_ROWS)
