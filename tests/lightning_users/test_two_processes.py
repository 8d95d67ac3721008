"""Two processes under Lightning: numbers and data of a Trainer, sharded models, and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import TransformersModule, set_seed
from tests.distributed.process_launch import PROCESSES, run_once_in_processes
from tests.lightning_users import two_processes
from tests.lightning_users.curves import EPOCHS
from tests.lightning_users.two_processes import EVALUATED_ROWS, SAVED_AFTER
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import tag_rows
from tests.scenarios.trainers import plain_descent

Results = list[dict[str, Any]]
SPLIT = {"fsdp2": {"DTensor"}, "tensor parallel": {"DTensor", "Parameter"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """Run two processes once for all tests, and return their folder and results."""
    return run_once_in_processes(tmp_path_factory, "module-in-two-processes", two_processes.__name__)


@pytest.fixture
def results(run: tuple[Path, Results]) -> Results:
    return run[1]


def test_numbers_are_those_of_a_trainer(results: Results) -> None:
    for result in (process["curves"] for process in results):
        assert len(result["ours"].losses) == 2 * EPOCHS
        assert result["lightning"] == result["ours"]
        in_order, plain = result["ours, in order"], result["plain loaders"]
        assert len(plain.losses) == 2 * EPOCHS
        torch.testing.assert_close(plain.losses, in_order.losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(plain.weights, in_order.weights, rtol=1e-5, atol=1e-6)


def test_an_exact_loss_is_the_loss_of_the_global_batch(results: Results) -> None:
    set_seed(0)
    expected_model, rows = two_processes.TAGGER().train(), tag_rows(24)
    expected = plain_descent(expected_model, (pad_tokens(rows[begin : begin + 8]) for begin in (0, 8, 16)), 0.1)
    for result in (process["exact"] for process in results):
        assert result["losses"] == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(result["weights"], list(expected_model.parameters()), rtol=1e-4, atol=1e-6)


def test_processes_shard_and_resume_the_data_as_in_a_trainer(results: Results) -> None:
    reads = [process["read"] for process in results]
    for result in reads:
        assert result["lightning"] == result["ours"] and len(result["lightning"]) == 6
        assert result["stream"] == result["our stream"] and len(result["stream"]) == 4
        assert result["resumed"] == result["lightning"][SAVED_AFTER:]
        assert result["places"] == PROCESSES
    assert {int(value) for result in reads for numbers, _ in result["unseeded"] for value in numbers} == set(range(22))


@pytest.mark.parametrize("strategy", SPLIT)
def test_a_sharded_model_trains_as_a_replicated_model(results: Results, strategy: str) -> None:
    replicated, split = results[0]["ddp"], results[0][strategy]
    assert replicated["split"] == {"Parameter"} and split["split"] == SPLIT[strategy]
    # The second optimizer step has a single micro-batch.
    assert split["losses"] == pytest.approx(replicated["losses"], abs=1e-5) and len(set(replicated["losses"])) == 3
    for name, expected in replicated["weights"].items():
        torch.testing.assert_close(split["weights"][name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
def test_both_log_the_same_losses_and_export_and_save_the_full_model(run: tuple[Path, Results], strategy: str) -> None:
    from transformers import AutoModelForCausalLM

    folder, results = run
    assert results[0][strategy]["losses"] == results[1][strategy]["losses"]
    exported = AutoModelForCausalLM.from_pretrained(folder / strategy).state_dict()
    loaded = TransformersModule.load_from_checkpoint(folder / f"{strategy}.ckpt").model.state_dict()
    for name, expected in results[0][strategy]["weights"].items():
        assert torch.equal(exported[name], expected) and torch.equal(loaded[name], expected)


def test_a_sharded_model_gathers_in_the_precision_of_the_trainer_and_its_loss_is_not_rounded(results: Results) -> None:
    assert [result["formats"] for result in results] == [[torch.bfloat16, torch.float32]] * PROCESSES


def test_metrics_count_each_row_of_both_processes_once(results: Results) -> None:
    by_function, streamed = results[0]["metrics"]["function"], results[0]["metrics"]["torchmetrics"]
    assert by_function == pytest.approx(streamed) and results[1]["metrics"] == results[0]["metrics"]
    right = by_function["val_accuracy"] * EVALUATED_ROWS
    assert right == pytest.approx(round(right), abs=1e-5)
