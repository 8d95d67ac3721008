from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from littrainer import Trainer
from littrainer.checkpoint.checksums import read_manifest
from littrainer.checkpoint.store import Store
from littrainer.checkpoint.verification import find_damage
from tests.scenarios.data import tiny_tokenizer
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.trainers import quiet_trainer

COMPLETE = {
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "training_args.bin",
    "littrainer_manifest.json",
    "littrainer_resume.pt",
}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_contains_all_files_for_a_resume(tmp_path: Path) -> None:
    quiet_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    assert names_in(tmp_path / "checkpoint-2") == COMPLETE
    quiet_trainer(tmp_path, max_steps=1, save_strategy="steps", save_only_model=True).train()
    resume_files = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "littrainer_resume.pt"}
    assert names_in(tmp_path / "checkpoint-1") == COMPLETE - resume_files


def test_a_pretrained_model_is_saved_so_that_from_pretrained_loads_it(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    trainer = quiet_trainer(tmp_path, tiny_bert_classifier(), trainer_kwargs={"processing_class": tokenizer})
    trainer.save_model(str(tmp_path / "model"))
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model")
    state = trainer.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert again("loss step")["input_ids"] == tokenizer("loss step")["input_ids"]


def test_the_collators_tokenizer_is_saved_if_the_trainer_has_none(tmp_path: Path) -> None:
    collator = transformers.DataCollatorWithPadding(tiny_tokenizer())
    quiet_trainer(tmp_path, tiny_bert_classifier(), trainer_kwargs={"data_collator": collator}).save_model()
    assert "tokenizer.json" in names_in(tmp_path)


def test_save_writes_the_given_state_dict(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in trainer.model.state_dict().items()}
    trainer._save(str(tmp_path / "zeros"), state_dict=zeros)
    assert all(not tensor.any() for tensor in load_file(tmp_path / "zeros" / "model.safetensors").values())


EVERY_STEP: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}


class CardWriter(Trainer):
    """A Trainer that adds files before and after a save."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True)
        (folder / "before").touch()
        super()._save_checkpoint(model, trial)
        assert names_in(folder) >= COMPLETE | {"before"}
        (folder / "after").touch()
        (folder / "trainer_state.json").write_text((folder / "trainer_state.json").read_text() + "\n")


class Rewriting(transformers.TrainerCallback):
    """A callback that replaces the model's file, as for adapters."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        assert names_in(folder) >= COMPLETE
        (folder / "adapter").mkdir()
        (folder / "model.safetensors").rename(folder / "adapter" / "weights.safetensors")


@pytest.mark.parametrize("trainer_kwargs", [{}, {"callbacks": [Rewriting()]}], ids=["override", "and on_save"])
def test_changes_by_overrides_and_callbacks_are_part_of_a_checkpoint(
    tmp_path: Path, trainer_kwargs: dict[str, Any]
) -> None:
    quiet_trainer(tmp_path, kind=CardWriter, trainer_kwargs=trainer_kwargs, **EVERY_STEP).train()
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        assert find_damage(folder) == []
        manifest = read_manifest(folder)
        assert manifest is not None and {"before", "after", "trainer_state.json"} <= set(manifest.files)
        assert ("adapter/weights.safetensors" in manifest.files) == bool(trainer_kwargs)
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint-1", "checkpoint-2"]


def test_older_checkpoints_are_deleted_only_after_the_new_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []

    def watch(store: Store, path: str) -> None:
        assert find_damage(tmp_path / "checkpoint-2") == []
        deleted.append(Path(path).name)

    monkeypatch.setattr(Store, "delete", watch)
    quiet_trainer(tmp_path, save_total_limit=1, **EVERY_STEP).train()
    assert deleted == ["checkpoint-1"]


def test_the_best_checkpoint_is_recorded_in_its_own_state(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model="loss", **EVERY_STEP)
    trainer.train()
    best = tmp_path / f"checkpoint-{trainer.state.best_global_step}"
    assert trainer.state.best_model_checkpoint == str(best) and best.is_dir()
    state = json.loads((best / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)
