"""A module in two processes: whole in each, sharded, or with layers that both compute; and metrics over both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import TransformersModule
from tests.distributed.together import found_together
from tests.lightning_users import sharing_process
from tests.lightning_users.sharing_process import EVALUATED_ROWS

Found = list[dict[str, Any]]
SPLIT = {"fsdp2": {"DTensor"}, "tensor parallel": {"DTensor", "Parameter"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """The folder in which two processes have run once for all tests, and what each of them found."""
    return found_together(tmp_path_factory, "module-in-two-processes", sharing_process.__name__)


@pytest.fixture
def folder(run: tuple[Path, Found]) -> Path:
    return run[0]


@pytest.fixture
def found(run: tuple[Path, Found]) -> Found:
    return run[1]


@pytest.mark.parametrize("strategy", SPLIT)
def test_a_model_that_is_split_trains_as_one_that_is_whole(found: Found, strategy: str) -> None:
    whole, split = found[0]["ddp"], found[0][strategy]
    assert whole["split"] == {"Parameter"} and split["split"] == SPLIT[strategy]
    # One of three micro-batches is left over for the second optimizer step; the first one logs nothing.
    assert split["losses"] == pytest.approx(whole["losses"], abs=1e-5) and len(set(whole["losses"])) == 3
    for name, expected in whole["weights"].items():
        torch.testing.assert_close(split["weights"][name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
def test_both_processes_log_the_same_losses(found: Found, strategy: str) -> None:
    assert found[0][strategy]["losses"] == found[1][strategy]["losses"]


@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
def test_a_model_in_parts_is_exported_and_saved_as_a_whole(found: Found, folder: Path, strategy: str) -> None:
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(folder / strategy).state_dict()
    kept = TransformersModule.load_from_checkpoint(folder / f"{strategy}.ckpt").model.state_dict()
    for name, expected in found[0][strategy]["weights"].items():
        assert torch.equal(exported[name], expected) and torch.equal(kept[name], expected)


def test_a_sharded_model_gathers_in_the_precision_of_the_trainer_and_its_loss_is_not_rounded(found: Found) -> None:
    for one in found:
        assert one["formats"] == [torch.bfloat16, torch.float32]


def test_metrics_count_each_row_of_both_processes_once(found: Found) -> None:
    for one in found:
        by_function, streamed = one["metrics"]["function"], one["metrics"]["torchmetrics"]
        assert by_function == pytest.approx(streamed)
        right = by_function["val_accuracy"] * EVALUATED_ROWS
        assert right == pytest.approx(round(right), abs=1e-5)
    assert found[0]["metrics"] == found[1]["metrics"]
