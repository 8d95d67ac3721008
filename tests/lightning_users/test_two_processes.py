"""Two processes under Lightning: the numbers and the data of a Trainer, a model whole or in parts, and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import TransformersModule, set_seed
from tests.distributed.together import PROCESSES, run_once_in_processes
from tests.lightning_users import two_processes
from tests.lightning_users.curves import EPOCHS
from tests.lightning_users.two_processes import EVALUATED_ROWS, SAVED_AFTER
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import tag_rows
from tests.scenarios.trainers import plain_descent

Found = list[dict[str, Any]]
SPLIT = {"fsdp2": {"DTensor"}, "tensor parallel": {"DTensor", "Parameter"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """The folder in which two processes have run once for all tests, and what each of them found."""
    return run_once_in_processes(tmp_path_factory, "module-in-two-processes", two_processes.__name__)


@pytest.fixture
def found(run: tuple[Path, Found]) -> Found:
    return run[1]


def test_numbers_are_those_of_a_trainer(found: Found) -> None:
    for one in (each["curves"] for each in found):
        assert len(one["ours"].losses) == 2 * EPOCHS
        assert one["lightning"] == one["ours"]
        in_order, plain = one["ours, in order"], one["plain loaders"]
        assert len(plain.losses) == 2 * EPOCHS
        torch.testing.assert_close(plain.losses, in_order.losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(plain.weights, in_order.weights, rtol=1e-5, atol=1e-6)


def test_an_exact_loss_is_that_of_the_whole_batch(found: Found) -> None:
    set_seed(0)
    whole, rows = two_processes.TAGGER().train(), tag_rows(24)
    expected = plain_descent(whole, (pad_tokens(rows[begin : begin + 8]) for begin in (0, 8, 16)), 0.1)
    for one in (each["exact"] for each in found):
        assert one["losses"] == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(one["weights"], list(whole.parameters()), rtol=1e-4, atol=1e-6)


def test_they_share_the_data_as_under_our_trainer_and_resume_it_together(found: Found) -> None:
    reads = [each["read"] for each in found]
    for one in reads:
        assert one["lightning"] == one["ours"] and len(one["lightning"]) == 6
        assert one["stream"] == one["our stream"] and len(one["stream"]) == 4
        assert one["resumed"] == one["lightning"][SAVED_AFTER:]
        assert one["places"] == PROCESSES
    assert {int(value) for one in reads for numbers, _ in one["unseeded"] for value in numbers} == set(range(22))


@pytest.mark.parametrize("strategy", SPLIT)
def test_a_model_that_is_split_trains_as_one_that_is_whole(found: Found, strategy: str) -> None:
    whole, split = found[0]["ddp"], found[0][strategy]
    assert whole["split"] == {"Parameter"} and split["split"] == SPLIT[strategy]
    # One of three micro-batches is left over for the second optimizer step; the first one logs nothing.
    assert split["losses"] == pytest.approx(whole["losses"], abs=1e-5) and len(set(whole["losses"])) == 3
    for name, expected in whole["weights"].items():
        torch.testing.assert_close(split["weights"][name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
def test_both_log_the_same_losses_and_the_model_is_exported_and_saved_as_a_whole(
    run: tuple[Path, Found], strategy: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder, found = run
    assert found[0][strategy]["losses"] == found[1][strategy]["losses"]
    exported = AutoModelForCausalLM.from_pretrained(folder / strategy).state_dict()
    kept = TransformersModule.load_from_checkpoint(folder / f"{strategy}.ckpt").model.state_dict()
    for name, expected in found[0][strategy]["weights"].items():
        assert torch.equal(exported[name], expected) and torch.equal(kept[name], expected)


def test_a_sharded_model_gathers_in_the_precision_of_the_trainer_and_its_loss_is_not_rounded(found: Found) -> None:
    assert [one["formats"] for one in found] == [[torch.bfloat16, torch.float32]] * PROCESSES


def test_metrics_count_each_row_of_both_processes_once(found: Found) -> None:
    by_function, streamed = found[0]["metrics"]["function"], found[0]["metrics"]["torchmetrics"]
    assert by_function == pytest.approx(streamed) and found[1]["metrics"] == found[0]["metrics"]
    right = by_function["val_accuracy"] * EVALUATED_ROWS
    assert right == pytest.approx(round(right), abs=1e-5)
