"""FSDP in two processes: the numbers are those of DDP, and any number of processes resumes the checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer.checkpoint.checksums import list_files
from littrainer.checkpoint.manager import CheckpointManager
from littrainer.checkpoint.reader import read_optimizer_state
from littrainer.checkpoint.sharded_files import read_fsdp_weights
from littrainer.checkpoint.verification import find_damage, read_manifest_or_empty
from tests.distributed import sharded_process
from tests.distributed.process_launch import read_results, run_in_processes
from tests.distributed.sharded_process import CHECKS, STEPS, create_adapter, curve, llama, make_trainer
from tests.scenarios.once_per_session import run_once

TOLERANCE = 1e-6
LIKE_DDP = [name for name, (_, reference) in CHECKS.items() if reference is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two processes that run the trainings of `sharded_process`."""

    def run(folder: Path) -> None:
        # A single process with the global batch of two.
        make_trainer(folder / "alone", save_strategy="steps", save_steps=2, per_device_train_batch_size=4).train()
        run_in_processes(sharded_process.__name__, folder)

    return run_once(tmp_path_factory, "sharing-a-model", run)


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return read_results(folder)


def same_numbers(curve: Any, expected: Any) -> bool:
    return all(row == pytest.approx(reference, abs=TOLERANCE) for row, reference in zip(curve, expected, strict=True))


@pytest.mark.parametrize("name", LIKE_DDP)
def test_a_sharded_model_trains_with_the_numbers_of_ddp(name: str, results: list[dict[str, Any]]) -> None:
    reference = results[0][str(CHECKS[name][1])]
    assert reference["curve"] and not reference["is_sharded"]
    for result in results:
        assert result[name]["is_sharded"]
        assert same_numbers(result[name]["curve"], reference["curve"])
    assert results[0][name]["weights"].keys() == reference["weights"].keys()
    for key, weight in results[0][name]["weights"].items():
        assert torch.allclose(weight, reference["weights"][key], atol=TOLERANCE), key


def test_each_process_has_half_of_the_parameters_by_layers(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["full"]["names"] == [
            "",
            "lm_head",
            "model.embed_tokens",
            "model.layers.0",
            "model.layers.1",
            "model.norm",
        ]
    sizes = [result["full"]["local elements"] for result in results]
    assert sum(sizes) == results[0]["full"]["elements"] and abs(sizes[0] - sizes[1]) < 0.1 * sum(sizes)


def test_evaluations_before_within_and_after_training_agree_with_ddp(results: list[dict[str, Any]]) -> None:
    reference = results[0]["ddp"]["evaluated"]
    for result in results:
        first, *within = result["full"]["evaluated"]
        assert first > within[0] > within[-1]
        assert within[-1] == pytest.approx(reference, abs=TOLERANCE)
        # The best model is the last.
        assert result["full"]["after"] == pytest.approx(reference, abs=TOLERANCE)
        assert result["full"]["predicted"] == results[0]["full"]["predicted"]


def test_all_processes_generate_the_tokens_of_the_full_model(folder: Path, results: list[dict[str, Any]]) -> None:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder / "full" / "saved")
    expected = model.generate(torch.tensor(sharded_process.PROMPT), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert [result["full"]["generated"] for result in results] == [expected.tolist()] * 2


def test_a_second_training_of_the_same_trainer_continues(results: list[dict[str, Any]]) -> None:
    for result in results:
        second = result["full"]["second curve"]
        assert len(second) == STEPS and second == results[0]["full"]["second curve"]
        assert second[-1][0] < result["full"]["curve"][-1][0]


@pytest.mark.parametrize("name", ["full", "sharded"])
def test_from_pretrained_loads_a_model_saved_with_full_or_sharded_checkpoints(
    name: str, folder: Path, results: list[dict[str, Any]]
) -> None:
    from transformers import LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(folder / name / "saved").state_dict()
    for key, weight in results[0][name]["weights"].items():
        assert torch.equal(loaded[key], weight)


def test_checkpoints_have_the_files_that_transformers_has_for_fsdp(folder: Path) -> None:
    full = {path.name for path in (folder / "full" / "kept").iterdir()}
    assert {"model.safetensors", "pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt", "rng_state_1.pth"} <= full
    assert "optimizer.pt" not in full
    sharded = {path.name for path in (folder / "sharded" / "checkpoint-2").iterdir()}
    assert {"pytorch_model_fsdp_0", "optimizer_0", "scheduler.pt", "rng_state_1.pth"} <= sharded
    assert not {"model.safetensors", "optimizer.bin", "optimizer.pt"} & sharded
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert {path.name for path in (folder / "sharded" / "checkpoint-2" / name).iterdir()} == {
            ".metadata",
            "__0_0.distcp",
            "__1_0.distcp",
        }
    assert (
        read_manifest_or_empty(folder / "full" / "kept").weights_are_finite
        and read_manifest_or_empty(folder / "sharded" / "checkpoint-2").weights_are_finite
    )


@pytest.mark.parametrize(
    ("waiting", "background"),
    [("full/kept", "full-in-background/checkpoint-2"), ("sharded/checkpoint-4", "sharded-in-background/checkpoint-4")],
)
def test_background_checkpoints_equal_synchronous_checkpoints(waiting: str, background: str, folder: Path) -> None:
    expected, ours = folder / waiting, folder / background
    assert find_damage(ours) == [] and list_files(ours) == list_files(expected)
    for read in (read_fsdp_weights, lambda checkpoint: read_optimizer_state(checkpoint)[1]["state"]):
        torch.testing.assert_close(read(ours), read(expected), rtol=0, atol=0)


@pytest.mark.parametrize("checkpoint", ["full/kept", "sharded/checkpoint-2", "sharded-in-background/checkpoint-2"])
def test_a_single_process_resumes_checkpoints_of_two(
    checkpoint: str, folder: Path, results: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert CheckpointManager().find(str(folder / checkpoint), str(folder)) is not None
    trainer = make_trainer(tmp_path, per_device_train_batch_size=4)
    trainer.train(resume_from_checkpoint=str(folder / checkpoint))
    assert same_numbers(curve(trainer), results[0]["ddp"]["curve"])


def test_two_processes_resume_a_checkpoint_of_a_single_process(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert same_numbers(result["after one process"]["curve"], results[0]["ddp"]["curve"])


def test_adapters_are_sharded_saved_and_resumed(folder: Path, results: list[dict[str, Any]], tmp_path: Path) -> None:
    reference = results[0]["adapter ddp"]
    for result in results:
        assert same_numbers(result["adapter"]["resumed"]["curve"], reference["curve"])
        assert result["adapter"]["generated"] == results[0]["adapter"]["generated"]
    saved = {path.name for path in (folder / "adapter" / "saved").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved
    trainer = make_trainer(tmp_path, create_adapter(), per_device_train_batch_size=4)
    trainer.train(resume_from_checkpoint=str(folder / "adapter" / "checkpoint-2"))
    assert same_numbers(curve(trainer), reference["curve"])


def test_arguments_without_sharding_leave_efficient_loading_to_those_with_it(results: list[dict[str, Any]]) -> None:
    assert [result["loaded in first process"]["is fsdp enabled"] for result in results] == [[True, True]] * 2


def test_half_precision_stays_near_full_precision(results: list[dict[str, Any]]) -> None:
    for result in results:
        half, full = result["half precision"], results[0]["ddp"]
        assert half["curve"] != full["curve"]
        for row, reference in zip(half["curve"], full["curve"], strict=True):
            assert row == pytest.approx(reference, abs=0.05)
        assert all(weight.dtype == torch.float32 for weight in half["weights"].values())
        # The loss is computed and logged in float32.
        assert half["formats"] == {(torch.float32, torch.bfloat16)}


def test_replicated_modules_stay_equal_in_all_processes(results: list[dict[str, Any]]) -> None:
    first, second = (result["replicated modules"]["replicated"] for result in results)
    assert {name.partition(".mlp.")[0] for name in first} == {"lm_head.weight", "model.layers.0"}
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_a_process_without_weights_has_full_parameters_of_the_current_unit_only(results: list[dict[str, Any]]) -> None:
    first, second = (result["full elements"] for result in results)
    assert first[-1] == -sum(parameter.numel() for parameter in llama().parameters())
    assert len(second) == len(first) and set(second) == {0}
