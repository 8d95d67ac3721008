"""Two processes that compute each layer together train as one does alone."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import tensor_parallel_process
from tests.distributed.tensor_parallel_process import (
    CHECKS,
    EVALUATED_ROWS,
    curve,
    llama,
    planned_trainer,
    replicas,
    trainer_of,
)
from tests.distributed.together import run_in_processes
from tests.scenarios.once_per_session import carried_out_once

TOLERANCE = 1e-6
CURVES = [name for name in CHECKS if name not in ("loaded split", "streamed")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process has trained alone and two have together; they are started once for all tests."""

    def run(folder: Path) -> None:
        for name in ("alone", "together"):
            (folder / name).mkdir()
        run_in_processes(tensor_parallel_process.__name__, folder / "together")
        tensor_parallel_process.main(folder / "alone")

    return carried_out_once(tmp_path_factory, "computing-together", run)


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What was found alone, and in each of the two processes."""
    files = [folder / "alone" / "0.pickle", *(folder / "together" / f"{rank}.pickle" for rank in range(2))]
    return [pickle.loads(file.read_bytes()) for file in files]


def assert_equal_curves(curves: list[Any]) -> None:
    alone, *together = (np.array(one) for one in curves)
    assert alone.shape == (4, 2)
    for one in together:
        assert np.abs(one - alone).max() < TOLERANCE


@pytest.mark.parametrize("name", CURVES)
def test_losses_and_gradient_norms_are_those_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    assert_equal_curves([one[name]["curve"] if name == "by plan" else one[name] for one in found])


def test_the_layers_of_the_plan_are_split_and_the_two_processes_count_as_one(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["by plan"] for one in found)
    assert (alone["split"], alone["sizes"]) == ([], (1, 1))
    for one in together:
        assert len(one["split"]) == 16 and not any("norm" in name for name in one["split"])
        assert one["sizes"] == (2, 1)
        for name in ("total batch", "tokens", "flos"):
            assert one[name] == alone[name]


def test_evaluations_count_each_sample_once(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["by plan"] for one in found)
    for one in together:
        assert one["metrics"]["eval_rows"] == EVALUATED_ROWS
        assert one["metrics"] == pytest.approx(alone["metrics"], rel=TOLERANCE)
        assert one["predictions"].shape == alone["predictions"].shape
        assert np.allclose(one["predictions"], alone["predictions"], atol=TOLERANCE)
    # A metric that is summed over processes.
    alone, *together = (one["streamed"] for one in found)
    assert together == [pytest.approx(alone)] * 2


def test_generation_is_that_of_one_process_and_a_resumed_training_goes_on(found: list[dict[str, Any]]) -> None:
    assert len({str(one["by plan"]["generated"]) for one in found}) == 1
    for one in found:
        assert np.abs(np.array(one["by plan"]["resumed"]) - np.array(one["by plan"]["curve"])).max() < TOLERANCE


def test_saved_models_are_whole(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    for place in ("by-plan/saved", "by-plan/run/checkpoint-4"):
        alone, together = (
            AutoModelForCausalLM.from_pretrained(folder / name / place).state_dict() for name in ("alone", "together")
        )
        assert set(alone) == set(together)
        for name, weights in alone.items():
            # Adam divides by the size of a gradient, so that one near 0 moves a weight by what it was rounded to.
            torch.testing.assert_close(together[name], weights, rtol=0, atol=1e-4)


def test_one_process_resumes_what_two_have_saved(folder: Path, found: list[dict[str, Any]], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, llama())
    trainer.train(resume_from_checkpoint=str(folder / "together" / "by-plan" / "run" / "checkpoint-2"))
    assert_equal_curves([found[0]["by plan"]["curve"], curve(trainer)])


def test_one_process_resumes_where_parameters_of_a_group_were_split_and_others_whole(
    folder: Path, found: list[dict[str, Any]], tmp_path: Path
) -> None:
    checkpoints = [folder / name / "plain-module" / "checkpoint-2" for name in ("alone", "together")]
    alone, together = (torch.load(one / "optimizer.pt", weights_only=True) for one in checkpoints)
    assert together["param_groups"] == alone["param_groups"]
    for number, entries in alone["state"].items():
        for entry, value in entries.items():
            torch.testing.assert_close(together["state"][number][entry], value, rtol=0, atol=TOLERANCE)
    trainer = planned_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=str(checkpoints[1]))
    # The dropout of another number of processes draws other numbers.
    assert curve(trainer)[:2] == found[1]["plain module"][:2] and len(curve(trainer)) == 4


def test_a_model_that_transformers_has_split_computes_and_trains_the_same(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["loaded split"] for one in found)
    assert_equal_curves([one["loaded split"]["curve"] for one in found])
    for one in together:
        assert one["sizes"] == (2, 1)
        assert one["loss"] == pytest.approx(alone["loss"], abs=TOLERANCE)
        assert np.allclose(one["gradient"], alone["gradient"], atol=TOLERANCE)
    # Split by transformers or by its plan here: the same slices, and the same training.
    for rank in (1, 2):
        assert_equal_curves([found[rank]["by plan"]["curve"], found[rank]["loaded split"]["curve"]])


def test_four_processes_train_two_copies_of_a_split_model_as_one_process_and_resume_exactly(tmp_path: Path) -> None:
    run_in_processes(tensor_parallel_process.__name__, tmp_path, processes=4)
    alone = replicas(tmp_path / "alone")
    for rank in range(4):
        one = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())["replicas"]
        assert np.abs(np.array(one["curve"]) - np.array(alone["curve"])).max() < TOLERANCE
        assert np.abs(np.array(one["resumed"]) - np.array(one["curve"])).max() < TOLERANCE
        assert (len(one["curve"]), one["rows"]) == (3, EVALUATED_ROWS)
