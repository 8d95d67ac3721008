"""The Hub has the same commits and files after a training as with transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from littrainer import Trainer
from tests.hub.runs import PUSHING, pushing_trainer
from tests.hub.server import Hub
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments

# Files of a checkpoint that transformers does not write.
OURS = ("littrainer_manifest.json", "littrainer_resume.pt")


def names_by_message(hub: Hub, name: str) -> list[tuple[str, list[str]]]:
    commits = hub.repository(name).branches["main"][1:]
    return [
        (commit.message, sorted(path for path in commit.files if path.rpartition("/")[2] not in OURS))
        for commit in commits
    ]


def disable_card(kind: Any) -> Any:
    """Return a Trainer class that writes no card, since cards differ, and waits for each push.

    A later save of transformers' would replace the files of a running push.
    """

    def push_and_wait(self: Any, checkpoint_folder: str) -> None:
        kind._push_from_checkpoint(self, checkpoint_folder)
        if self.push_in_progress is not None:
            self.push_in_progress.wait_until_done()

    members = {"create_model_card": lambda self, **_: None, "_push_from_checkpoint": push_and_wait}
    return type("WithoutCard", (kind,), members)


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_commits_and_files_of_a_strategy_are_those_of_transformers(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    # Drop the client for the Hub of another test.
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)
    both: dict[str, Any] = {**PUSHING, "hub_strategy": strategy, "logging_strategy": "no"}
    ours = pushing_trainer(tmp_path / "ours", **both, hub_model_id="ours", kind=disable_card(Trainer))
    theirs = disable_card(transformers.Trainer)(
        VectorClassifier(),
        quiet_arguments(tmp_path / "theirs", kind=transformers.TrainingArguments, **both, hub_model_id="theirs"),
        train_dataset=Rows(vector_rows(10)),
        eval_dataset=Rows(vector_rows(7, seed=1)),
    )
    for trainer in (ours, theirs):
        trainer.train()
        trainer.save_model()
        assert trainer.push_in_progress is None or trainer.push_in_progress.is_done()
    assert names_by_message(hub, "ours") == names_by_message(hub, "theirs")
