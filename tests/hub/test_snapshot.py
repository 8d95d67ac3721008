"""Which files of a checkpoint, and of the folder around it, are set aside for a push."""

from __future__ import annotations

from pathlib import Path

import pytest

from littrainer.hub.snapshot import COPIED_BYTES, take_beside_model, take_checkpoint, take_model
from tests.hub.runs import files_below

MODEL = ("config.json", "model.safetensors", "training_args.bin", "tokenizer.json", "custom/code.py")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
TO_RESUME = ("trainer_state.json", "scheduler.pt", "littrainer_manifest.json", "README.md")

# Kind of checkpoint -> files that load the model, and files that only resuming needs.
CHECKPOINTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "of one process": (MODEL, (*TO_RESUME, "optimizer.pt", "scaler.pt", "rng_state.pth", "littrainer_resume.pt")),
    "of two processes": (MODEL, (*TO_RESUME, "rng_state_0.pth", "rng_state_1.pth", "littrainer_resume_1.pt")),
    "of an adapter": (ADAPTER, (*TO_RESUME, "optimizer.pt")),
    "of FSDP in parts": (
        ("config.json", "training_args.bin"),
        (*TO_RESUME, "pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata", "optimizer_0/__1_0.distcp"),
    ),
    "of DeepSpeed's engine": (
        ("config.json", "model.safetensors"),
        (*TO_RESUME, "global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt", "latest", "zero_to_fp32.py"),
    ),
}


def filled(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    return folder


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_the_model_is_what_loads_it_and_the_checkpoint_is_everything(tmp_path: Path, kind: str) -> None:
    loads, resumes = CHECKPOINTS[kind]
    checkpoint = filled(tmp_path / "checkpoint-4", (*loads, *resumes))
    take_model(checkpoint, tmp_path / "model")
    take_checkpoint(checkpoint, tmp_path / "whole")
    everything = files_below(checkpoint)
    assert files_below(tmp_path / "model") == {name: everything[name] for name in loads}
    assert files_below(tmp_path / "whole") == everything


def test_a_large_file_of_a_checkpoint_takes_no_room_and_outlives_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = filled(tmp_path / "checkpoint-4", ("config.json",))
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.truncate(COPIED_BYTES + 1)
    take_model(checkpoint, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").samefile(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    assert (tmp_path / "model" / "model.safetensors").stat().st_size == COPIED_BYTES + 1


def test_checkpoints_of_a_lightning_trainer_are_no_part_of_the_model(tmp_path: Path) -> None:
    checkpoint = ("model.safetensors", "lightning_state.pt", "tokenizer/vocab.json")
    run = filled(tmp_path / "run", ("notes.txt", *(f"epoch=0-step=2.ckpt/{name}" for name in checkpoint)))
    filled(run / ".littrainer_from-lightning-step-2", ("optimizer.pt", "model.safetensors"))
    take_beside_model(run, tmp_path / "taken")
    assert list(files_below(tmp_path / "taken")) == ["notes.txt"]


def test_a_large_file_beside_checkpoints_is_copied_since_it_may_be_written_into(tmp_path: Path) -> None:
    with (filled(tmp_path / "run", ("notes.txt",)) / "log.txt").open("wb") as file:
        file.truncate(COPIED_BYTES + 1)
    take_beside_model(tmp_path / "run", tmp_path / "linked", links=True)
    assert (tmp_path / "linked" / "log.txt").samefile(tmp_path / "run" / "log.txt")
    take_beside_model(tmp_path / "run", tmp_path / "taken")
    with (tmp_path / "run" / "log.txt").open("ab") as file:
        file.write(b"more")
    assert (tmp_path / "taken" / "log.txt").stat().st_size == COPIED_BYTES + 1
