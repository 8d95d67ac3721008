"""Two processes that share a model (FSDP) train as two do that have one each; any number resumes their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer.checkpoint.checksums import list_files
from littrainer.checkpoint.distributed_resume import find_checkpoint_to_resume
from littrainer.checkpoint.reader import read_optimizer_state
from littrainer.checkpoint.sharded_files import read_fsdp_weights
from littrainer.checkpoint.verification import damage_in, readable_manifest
from tests.distributed import sharded_process
from tests.distributed.sharded_process import CHECKS, STEPS, adapter, curve, llama, trainer_of
from tests.distributed.together import read_results, run_in_processes
from tests.scenarios.once_per_session import carried_out_once

TOLERANCE = 1e-6
LIKE_DDP = [name for name, (_, reference) in CHECKS.items() if reference is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have trained together; they are started once for all tests."""

    def run(folder: Path) -> None:
        # The samples of one optimizer step of two processes.
        trainer_of(folder / "alone", save_strategy="steps", save_steps=2, per_device_train_batch_size=4).train()
        run_in_processes(sharded_process.__name__, folder)

    return carried_out_once(tmp_path_factory, "sharing-a-model", run)


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return read_results(folder)


def same_numbers(one: Any, other: Any) -> bool:
    return all(numbers == pytest.approx(wanted, abs=TOLERANCE) for numbers, wanted in zip(one, other, strict=True))


@pytest.mark.parametrize("name", LIKE_DDP)
def test_a_sharded_model_trains_with_the_numbers_of_ddp(name: str, found: list[dict[str, Any]]) -> None:
    reference = found[0][str(CHECKS[name][1])]
    assert reference["curve"] and not reference["is_sharded"]
    for one in found:
        assert one[name]["is_sharded"]
        assert same_numbers(one[name]["curve"], reference["curve"])
    assert found[0][name]["weights"].keys() == reference["weights"].keys()
    for key, weight in found[0][name]["weights"].items():
        assert torch.allclose(weight, reference["weights"][key], atol=TOLERANCE), key


def test_each_process_has_half_of_the_parameters_by_layers(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["whole"]["names"] == [
            "",
            "lm_head",
            "model.embed_tokens",
            "model.layers.0",
            "model.layers.1",
            "model.norm",
        ]
    parts = [one["whole"]["local elements"] for one in found]
    assert sum(parts) == found[0]["whole"]["elements"] and abs(parts[0] - parts[1]) < 0.1 * sum(parts)


def test_evaluations_before_within_and_after_training_agree_with_ddp(found: list[dict[str, Any]]) -> None:
    reference = found[0]["ddp"]["evaluated"]
    for one in found:
        first, *within = one["whole"]["evaluated"]
        assert first > within[0] > within[-1]
        assert within[-1] == pytest.approx(reference, abs=TOLERANCE)
        # The best model, which is the last one here, has been loaded at the end.
        assert one["whole"]["after"] == pytest.approx(reference, abs=TOLERANCE)
        assert one["whole"]["predicted"] == found[0]["whole"]["predicted"]


def test_all_processes_generate_what_the_whole_model_does(folder: Path, found: list[dict[str, Any]]) -> None:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder / "whole" / "saved")
    alone = model.generate(torch.tensor(sharded_process.PROMPT), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert [one["whole"]["generated"] for one in found] == [alone.tolist()] * 2


def test_a_second_training_of_the_same_trainer_goes_on(found: list[dict[str, Any]]) -> None:
    for one in found:
        again = one["whole"]["again"]
        assert len(again) == STEPS and again == found[0]["whole"]["again"]
        assert again[-1][0] < one["whole"]["curve"][-1][0]


@pytest.mark.parametrize("name", ["whole", "parts"])
def test_a_saved_model_is_loaded_by_from_pretrained_however_checkpoints_are_saved(
    name: str, folder: Path, found: list[dict[str, Any]]
) -> None:
    from transformers import LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(folder / name / "saved").state_dict()
    for key, weight in found[0][name]["weights"].items():
        assert torch.equal(loaded[key], weight)


def test_checkpoints_have_the_files_that_transformers_has_for_fsdp(folder: Path) -> None:
    whole = {path.name for path in (folder / "whole" / "kept").iterdir()}
    assert {"model.safetensors", "pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt", "rng_state_1.pth"} <= whole
    assert "optimizer.pt" not in whole
    parts = {path.name for path in (folder / "parts" / "checkpoint-2").iterdir()}
    assert {"pytorch_model_fsdp_0", "optimizer_0", "scheduler.pt", "rng_state_1.pth"} <= parts
    assert not {"model.safetensors", "optimizer.bin", "optimizer.pt"} & parts
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert {path.name for path in (folder / "parts" / "checkpoint-2" / name).iterdir()} == {
            ".metadata",
            "__0_0.distcp",
            "__1_0.distcp",
        }
    assert (
        readable_manifest(folder / "whole" / "kept").weights_are_finite
        and readable_manifest(folder / "parts" / "checkpoint-2").weights_are_finite
    )


@pytest.mark.parametrize(
    ("waiting", "background"),
    [("whole/kept", "whole-in-background/checkpoint-2"), ("parts/checkpoint-4", "parts-in-background/checkpoint-4")],
)
def test_checkpoints_written_in_the_background_are_those_of_trainings_that_wait(
    waiting: str, background: str, folder: Path
) -> None:
    wanted, ours = folder / waiting, folder / background
    assert damage_in(ours) == [] and list_files(ours) == list_files(wanted)
    for read in (read_fsdp_weights, lambda checkpoint: read_optimizer_state(checkpoint)[1]["state"]):
        torch.testing.assert_close(read(ours), read(wanted), rtol=0, atol=0)


@pytest.mark.parametrize("checkpoint", ["whole/kept", "parts/checkpoint-2", "parts-in-background/checkpoint-2"])
def test_one_process_resumes_what_two_have_sharded(
    checkpoint: str, folder: Path, found: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert find_checkpoint_to_resume(str(folder / checkpoint), str(folder)) is not None
    alone = trainer_of(tmp_path, per_device_train_batch_size=4)
    alone.train(resume_from_checkpoint=str(folder / checkpoint))
    # The loss of a window is the same whether its samples are in one micro-batch or in two.
    assert same_numbers(curve(alone), found[0]["ddp"]["curve"])


def test_two_processes_shard_what_one_has_saved(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert same_numbers(one["after one process"]["curve"], found[0]["ddp"]["curve"])


def test_adapters_are_sharded_saved_and_resumed(folder: Path, found: list[dict[str, Any]], tmp_path: Path) -> None:
    reference = found[0]["adapter ddp"]
    for one in found:
        assert same_numbers(one["adapter"]["resumed"]["curve"], reference["curve"])
        assert one["adapter"]["generated"] == found[0]["adapter"]["generated"]
    saved = {path.name for path in (folder / "adapter" / "saved").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved
    alone = trainer_of(tmp_path, adapter(), per_device_train_batch_size=4)
    alone.train(resume_from_checkpoint=str(folder / "adapter" / "checkpoint-2"))
    assert same_numbers(curve(alone), reference["curve"])


def test_arguments_without_sharding_leave_efficient_loading_to_those_with_it(found: list[dict[str, Any]]) -> None:
    assert [process["loaded by the first"]["told"] for process in found] == [[True, True]] * 2


def test_half_precision_stays_near_full_precision(found: list[dict[str, Any]]) -> None:
    for one in found:
        half, full = one["half precision"], found[0]["ddp"]
        assert half["curve"] != full["curve"]
        for numbers, wanted in zip(half["curve"], full["curve"], strict=True):
            assert numbers == pytest.approx(wanted, abs=0.05)
        assert all(weight.dtype == torch.float32 for weight in half["weights"].values())
        # The model computes its loss in float32, and in that format it is logged.
        assert half["formats"] == {(torch.float32, torch.bfloat16)}


def test_modules_that_are_left_out_of_the_sharding_stay_the_same_everywhere(found: list[dict[str, Any]]) -> None:
    one, other = (each["whole modules"]["whole"] for each in found)
    assert {name.partition(".mlp.")[0] for name in one} == {"lm_head.weight", "model.layers.0"}
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_a_process_without_weights_never_holds_more_than_the_modules_at_hand(found: list[dict[str, Any]]) -> None:
    first, other = (one["kept whole"] for one in found)
    assert first[-1] == -sum(parameter.numel() for parameter in llama().parameters())
    assert len(other) == len(first) and set(other) == {0}
