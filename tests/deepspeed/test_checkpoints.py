"""Checkpoints of a training with the stand-in for DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from littrainer import Trainer
from tests.deepspeed.test_training import RUN, TORCH_OPTIMIZER, steps
from tests.deepspeed.variants import ENGINE_SCHEDULE, stage
from tests.scenarios.trainers import quiet_trainer

SAVING: dict[str, Any] = {**RUN, "save_strategy": "steps", "save_steps": 2}
# Files of a checkpoint in addition to the engine's.
FURTHER_FILES = {
    "latest",
    "littrainer_manifest.json",
    "littrainer_resume.pt",
    "model.safetensors",
    "rng_state.pth",
    "trainer_state.json",
    "training_args.bin",
    "zero_to_fp32.py",
}


def train(folder: Path, resume: Any = None, **changes: Any) -> Trainer:
    trainer = quiet_trainer(folder, **{**SAVING, **changes})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def list_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "sections", [{}, {**TORCH_OPTIMIZER, **ENGINE_SCHEDULE}], ids=["of the arguments", "of the engine"]
)
def test_a_resumed_training_continues_exactly(deepspeed: Any, tmp_path: Path, sections: dict[str, Any]) -> None:
    uninterrupted = train(tmp_path, deepspeed=stage(2, sections), warmup_steps=1)
    torch.manual_seed(99)
    resumed = train(tmp_path, resume=str(tmp_path / "checkpoint-2"), deepspeed=stage(2, sections), warmup_steps=1)
    assert steps(resumed) == steps(uninterrupted) and len(steps(uninterrupted)) == 4
    # The engine's folder replaces the optimizer's state.
    schedule = set() if sections else {"scheduler.pt"}
    assert list_names(tmp_path / "checkpoint-2") == {*FURTHER_FILES, "global_step2"} | schedule
    assert (tmp_path / "checkpoint-2" / "latest").read_text() == "global_step2"
    assert resumed.deepspeed.global_steps == 4
    loaded = next(keywords for name, keywords in resumed.deepspeed.calls if name == "load")
    assert loaded == {"load_module_strict": True, "load_optimizer_states": True, "load_lr_scheduler_states": True}
    # Resume it as a checkpoint of transformers.
    for name in ("littrainer_manifest.json", "littrainer_resume.pt"):
        (tmp_path / "checkpoint-2" / name).unlink()
    resumed = train(tmp_path, resume=str(tmp_path / "checkpoint-2"), deepspeed=stage(2, sections), warmup_steps=1)
    assert steps(resumed) == steps(uninterrupted)


def test_the_best_model_is_loaded_by_the_engine(deepspeed: Any, tmp_path: Path) -> None:
    trainer = train(
        tmp_path,
        deepspeed=stage(3),
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        greater_is_better=True,
        metric_for_best_model="loss",
    )
    # The loss falls: the first evaluation is the best with greater_is_better.
    assert trainer.state.best_global_step == 2 and trainer.deepspeed.calls[-1][0] == "load"
    best = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(value, best[name]) for name, value in trainer.model.state_dict().items())


def test_stage_3_gathers_the_weights_that_are_saved(deepspeed: Any, tmp_path: Path) -> None:
    trainer = train(tmp_path, deepspeed=stage(3), save_strategy="no")
    trainer.save_model(str(tmp_path / "saved"))
    assert trainer.deepspeed.calls[-1] == ("gather", False)
    assert trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    assert set(gathered) == set(trainer.model.state_dict()) and trainer.deepspeed.calls[-2:] == [("gather", False)] * 2
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in trainer.model.state_dict().items())


def test_stage_3_without_gathering_writes_only_the_files_of_the_engine(
    deepspeed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = stage(3, stage3_gather_16bit_weights_on_model_save=False)
    first = train(tmp_path, deepspeed=config)
    assert list_names(tmp_path / "checkpoint-2") == {*FURTHER_FILES, "global_step2", "scheduler.pt"} - {
        "model.safetensors"
    }
    assert "zero_to_fp32.py" in caplog.text
    resumed = train(tmp_path, resume=True, deepspeed=config, num_train_epochs=3)
    assert resumed.state.global_step == 6
    assert steps(resumed)[:4] == steps(first)


@pytest.mark.parametrize(
    ("written", "resumed", "complaint"),
    [
        ({}, {"deepspeed": stage(2)}, r"checkpoint-2 has no folder global_step\* of DeepSpeed's engine"),
        ({"deepspeed": stage(2)}, {}, r"optimizer\.pt"),
    ],
)
def test_a_checkpoint_is_not_resumed_by_the_other_engine(
    deepspeed: Any, tmp_path: Path, written: dict[str, Any], resumed: dict[str, Any], complaint: str
) -> None:
    train(tmp_path, **written)
    with pytest.raises((ValueError, OSError), match=complaint):
        train(tmp_path, resume=str(tmp_path / "checkpoint-2"), **resumed)


def test_an_error_says_how_to_resume_with_another_number_of_processes(deepspeed: Any, tmp_path: Path) -> None:
    train(tmp_path, deepspeed=stage(2))
    parts = tmp_path / "checkpoint-2" / "global_step2"
    written = parts / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    (parts / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(written.read_bytes())
    for name in ("littrainer_manifest.json", "littrainer_resume.pt"):
        (tmp_path / "checkpoint-2" / name).unlink()
    resume = str(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match=r"written by 2 processes of DeepSpeed.*there are 1\..*ds_to_universal\.py"):
        train(tmp_path, resume=resume, deepspeed=stage(2))
    train(tmp_path, resume=resume, deepspeed={**stage(2), "checkpoint": {"load_universal": True}})
