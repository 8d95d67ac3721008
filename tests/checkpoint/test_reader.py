from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from littrainer.checkpoint.manager import NEEDED_TO_RESUME, CheckpointManager
from littrainer.checkpoint.reader import load_optimizer, load_random_states, load_scheduler
from littrainer.checkpoint.weights import write_weights
from tests.checkpoint.malicious import Creates
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


def complete_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in NEEDED_TO_RESUME:
        torch.save({}, folder / name)
    step = int(folder.name.partition("checkpoint-")[2] or 0)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    save_file(VectorClassifier().state_dict(), folder / "model.safetensors")
    return folder


def test_resume_from_checkpoint_is_none_true_or_a_folder(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        complete_checkpoint(tmp_path / f"checkpoint-{step}")
    folder = complete_checkpoint(tmp_path / "elsewhere")
    assert CheckpointManager().find(True, str(tmp_path)) == tmp_path / "checkpoint-10"
    assert CheckpointManager().find(str(folder), "unused") == folder
    assert {CheckpointManager().find(nothing, str(tmp_path)) for nothing in (None, False, "")} == {None}


def test_last_checkpoint_is_a_pushed_folder_or_else_the_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resume_from_checkpoint=last-checkpoint, but there is no intact"):
        CheckpointManager().find("last-checkpoint", str(tmp_path))
    newest = complete_checkpoint(tmp_path / "checkpoint-7")
    assert CheckpointManager().find("last-checkpoint", str(tmp_path)) == newest
    pushed = complete_checkpoint(tmp_path / "last-checkpoint")
    assert CheckpointManager().find("last-checkpoint", str(tmp_path)) == pushed


def test_true_as_text_is_no_folder_and_said_to_be_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no such folder.*'True' is text: write True without quotes"):
        CheckpointManager().find("True", str(tmp_path))


@pytest.mark.parametrize("missing", [[name] for name in NEEDED_TO_RESUME] + [list(NEEDED_TO_RESUME[1:])], ids=str)
def test_a_checkpoint_that_lacks_files_is_refused_with_each_of_them(tmp_path: Path, missing: list[str]) -> None:
    folder = complete_checkpoint(tmp_path / "checkpoint-3")
    for name in missing:
        os.remove(folder / name)
    with pytest.raises(ValueError, match=r"checkpoint-3.*another checkpoint.*from_pretrained") as caught:
        CheckpointManager().find(str(folder), str(tmp_path))
    verb = "is" if len(missing) == 1 else "are"
    assert f"checkpoint-3: {', '.join(missing)} {verb} missing" in str(caught.value)


def trained_checkpoint(folder: Path, **changes: Any) -> Path:
    quiet_trainer(folder, max_steps=2, save_strategy="steps", save_steps=2, **changes).train()
    return folder / "checkpoint-2"


def test_an_edited_complete_checkpoint_resumes_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = trained_checkpoint(tmp_path)
    model = VectorClassifier()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    write_weights(model, folder, max_shard_size=250)
    (folder / "notes.txt").touch()
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "log_history": []}))
    again = quiet_trainer(tmp_path, max_steps=2)
    assert again.train(resume_from_checkpoint=True).global_step == 2
    (warning,) = [text for text in caplog.messages if "was edited (" in text]
    assert "trainer_state.json changed" in warning and "notes.txt added" in warning
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.model.state_dict().items())


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_code_in_a_checkpoint_is_refused_with_the_files_name(tmp_path: Path, name: str) -> None:
    folder, trace = trained_checkpoint(tmp_path), tmp_path / "was-run"
    torch.save({"state": Creates(trace)}, folder / name)
    (folder / "littrainer_manifest.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is refused: it names .*could run code"):
        quiet_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=str(folder))
    assert not trace.exists()


def test_pickled_training_arguments_are_never_loaded(tmp_path: Path) -> None:
    folder, trace = trained_checkpoint(tmp_path), tmp_path / "was-run"
    torch.save(Creates(trace), folder / "training_args.bin")
    (folder / "littrainer_manifest.json").unlink(missing_ok=True)
    quiet_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=str(folder))
    assert not trace.exists()


def test_missing_random_states_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_random_states(tmp_path, quiet_arguments(tmp_path))
    assert "has no rng_state.pth" in caplog.text


def test_an_optimizer_state_with_other_groups_is_refused_unless_load_state_dict_is_overridden(tmp_path: Path) -> None:
    def grouped(groups: int, kind: Any = torch.optim.SGD) -> Any:
        return kind([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=0.1)

    class CustomOptimizer(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            pass

    torch.save(grouped(3).state_dict(), tmp_path / "optimizer.pt")
    message = r"optimizer\.pt does not fit .*its groups have \[1, 1, 1\] .*those of the optimizer have \[1, 1\]"
    with pytest.raises(ValueError, match=message):
        load_optimizer(nn.Module(), grouped(2), tmp_path)
    load_optimizer(nn.Module(), grouped(2, CustomOptimizer), tmp_path)


def test_a_scheduler_with_equal_groups_loads_into_another_number_of_groups(tmp_path: Path) -> None:
    def schedule(groups: int) -> Any:
        optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": 0.1} for _ in range(groups)])
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    torch.save(schedule(3).state_dict(), tmp_path / "scheduler.pt")
    split = schedule(2)
    load_scheduler(split, 2, tmp_path)
    assert split.base_lrs == [0.1, 0.1]
