"""The uploads of each strategy, compared byte for byte with the files on disk."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer, TrainerCallback
from littrainer.hub.push_to_hub import SNAPSHOT_DIR
from tests.hub.runs import PUSHING, AtEnd, AtStep, files_below, pushing_trainer
from tests.hub.server import GOOD_TOKEN, MAIN, Fault, Hub
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.other_processes import MAX_WAIT_SECONDS
from tests.scenarios.trainers import quiet_arguments

SAVES = [f"Training in progress, step {step}" for step in (2, 4, 6)]
CHECKPOINT_STRATEGIES = [message for save in SAVES for message in (save, f"{save}, checkpoint")]


def below(prefix: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {name.removeprefix(prefix): content for name, content in files.items() if name.startswith(prefix)}


def test_files_of_an_earlier_checkpoint_are_removed_from_last_checkpoint(hub: Hub, tmp_path: Path) -> None:
    class WithExtraFile(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            if self.state.global_step == 2:
                Path(str(output_dir), "only_at_step_2.txt").write_text("here")

    pushing_trainer(tmp_path, hub_strategy="checkpoint", kind=WithExtraFile).train()
    first, *_, last = (commit for commit in hub.repository().branches[MAIN] if commit.message.endswith("checkpoint"))
    assert "last-checkpoint/only_at_step_2.txt" in first.files
    assert "last-checkpoint/only_at_step_2.txt" not in last.files


def test_training_does_not_wait_for_a_push_and_skips_saves_while_it_runs(hub: Hub, tmp_path: Path) -> None:
    may_respond = threading.Event()
    hub.faults.append(Fault("POST .*/preupload/", until=may_respond))
    trainer = pushing_trainer(tmp_path, hub_always_push=False, trainer_kwargs={"callbacks": [AtEnd(may_respond.set)]})
    trainer.train()
    assert hub.repository().messages() == SAVES[:1]


def test_with_always_push_each_save_is_pushed_after_a_slow_push(hub: Hub, tmp_path: Path) -> None:
    may_respond = threading.Event()
    hub.faults.append(Fault("POST .*/preupload/", until=may_respond))
    trainer = pushing_trainer(tmp_path, save_total_limit=1, trainer_kwargs={"callbacks": [AtEnd(may_respond.set)]})
    trainer.train()
    assert hub.repository().messages() == SAVES
    sizes = {len(commit.files["model.safetensors"]) for commit in hub.repository().branches[MAIN][1:]}
    contents = {commit.files["model.safetensors"] for commit in hub.repository().branches[MAIN][1:]}
    assert len(sizes) == 1 and len(contents) == 3


def test_a_checkpoint_written_in_the_background_is_pushed_when_it_is_complete(hub: Hub, tmp_path: Path) -> None:
    pushing_trainer(tmp_path, hub_strategy="checkpoint", async_save=True, save_total_limit=1).train()
    assert hub.repository().messages() == CHECKPOINT_STRATEGIES
    assert below("last-checkpoint/", hub.repository().files()) == files_below(tmp_path / "run" / "checkpoint-6")


def test_a_save_of_an_epoch_is_named_after_the_epoch(hub: Hub, tmp_path: Path) -> None:
    pushing_trainer(tmp_path, save_strategy="epoch", max_steps=-1, num_train_epochs=2).train()
    assert hub.repository().messages() == ["Training in progress, epoch 1", "Training in progress, epoch 2"]


def test_other_files_in_output_dir_are_pushed_except_incomplete_files_and_other_trainings(
    hub: Hub, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    pushed_files = ["notes.md", "logs/events.out"]
    excluded_files = [
        *("_private.txt", "checkpoint-1/model.safetensors", "run-0/checkpoint-5/optimizer.pt", "a.tmp", "b.lock"),
        *(".unfinished/checkpoint-9/optimizer.pt", ".results.json.unfinished-77", "last-checkpoint/optimizer.pt"),
        *(".littrainer_running_elsewhere", "x/.littrainer_running", ".git/config"),
    ]
    for name in (*pushed_files, *excluded_files):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    trainer = pushing_trainer(tmp_path, max_steps=2)
    trainer.train()
    trainer.push_to_hub()
    for commit in hub.repository().branches[MAIN][1:]:
        assert {name: commit.files[name] for name in pushed_files} == {name: name.encode() for name in pushed_files}
        assert [name for name in excluded_files if name in commit.files] == []
        assert not [name for name in commit.files if "littrainer" in name]


@pytest.mark.parametrize("is_first", [True, False])
def test_an_unknown_card_keyword_is_refused_in_each_process_before_any_work(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    events: list[bool] = []

    class Listener(TrainerCallback):
        def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(True)

    trainer = pushing_trainer(tmp_path, save_strategy="no", trainer_kwargs={"callbacks": [Listener]})
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: is_first)
    with pytest.raises(TypeError, match="unexpected keyword argument 'licence'"):
        trainer.push_to_hub(licence="mit")
    assert events == [] and files_below(tmp_path / "run") == {}


def test_push_to_hub_returns_the_commit_or_a_future_and_sends_the_files_of_that_moment(
    hub: Hub, tmp_path: Path
) -> None:
    run, may_respond = tmp_path / "run", threading.Event()
    trainer = pushing_trainer(tmp_path, push_to_hub=False, save_strategy="no")
    trainer.train()
    assert hub.repositories == {}
    commit = trainer.push_to_hub(commit_message="by hand")
    repository = hub.repository()
    assert (commit.oid, repository.messages()) == (repository.branches[MAIN][-1].oid, ["by hand"])
    (run / "notes.txt").write_text("before")
    hub.faults.append(Fault("POST .*/preupload/", until=may_respond))
    future = trainer.push_to_hub(commit_message="later", blocking=False)
    before = files_below(run)
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1)
    trainer._save(str(run))
    (run / "notes.txt").write_text("after")
    (run / "more.txt").write_text("after")
    assert files_below(run)["model.safetensors"] != before["model.safetensors"]
    may_respond.set()
    assert future.result(MAX_WAIT_SECONDS).oid == repository.branches[MAIN][-1].oid
    assert repository.messages() == ["by hand", "later"]
    pushed = {name: content for name, content in repository.files().items() if name != ".gitattributes"}
    assert pushed == {name: content for name, content in before.items() if not name.startswith(SNAPSHOT_DIR)}
    assert not (run / SNAPSHOT_DIR).exists()


def test_trials_of_a_search_push_as_trainings_do(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    changes: dict[str, Any] = {"hub_strategy": "all_checkpoints", "max_steps": 2, "eval_strategy": "epoch"}
    trainer = Trainer(
        args=quiet_arguments(tmp_path / "run", **{**PUSHING, **changes}),
        model_init=lambda: VectorClassifier(),
        train_dataset=Rows(vector_rows(8)),
        eval_dataset=Rows(vector_rows(4)),
    )

    def space(trial: Any) -> dict[str, Any]:
        # Equal trials would leave nothing to commit.
        return {"learning_rate": 0.01 * (1 + trial.number), "seed": trial.suggest_int("seed", 1, 9)}

    trainer.hyperparameter_search(space, n_trials=2, backend="optuna")
    # Checkpoints of the last trial replace equal names.
    assert hub.repository().messages() == CHECKPOINT_STRATEGIES[:2] * 2
    files = hub.repository().files()
    assert below("checkpoint-2/", files) == files_below(tmp_path / "run" / "run-1" / "checkpoint-2")
    assert {name.partition("/")[0] for name in files if "/" in name} == {"checkpoint-2"}
    # As in transformers the search leaves no model.
    trainer.train()
    trainer.push_to_hub()
    assert not [name for name in hub.repository().files() if name.startswith("run-")]


def weights(trainer: Trainer) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in trainer.model.state_dict().items()}


def test_a_download_of_the_repository_is_an_output_folder_to_resume_in(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    uninterrupted = pushing_trainer(tmp_path / "whole", push_to_hub=False)
    uninterrupted.train()

    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    first = pushing_trainer(
        tmp_path / "first", hub_strategy="checkpoint", trainer_kwargs={"callbacks": [AtStep(5, stop)]}
    )
    with pytest.raises(Stopped):
        first.train()
    first.push_in_progress.wait_until_done()
    shutil.rmtree(tmp_path / "first")

    folder = tmp_path / "second" / "run"
    snapshot_download("someone/run", local_dir=folder, token=GOOD_TOKEN)
    second = pushing_trainer(tmp_path / "second", hub_strategy="checkpoint")
    second.train(resume_from_checkpoint="last-checkpoint")
    assert second.state.global_step == 6
    assert weights(second) == weights(uninterrupted)
    assert hub.repository().messages()[-1] == "Training in progress, step 6, checkpoint"
