"""What lies on the Hub after a training is what transformers' own Trainer leaves there, through the same client."""

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

# Files of a checkpoint that are not in one of transformers.
OURS = ("littrainer_manifest.json", "littrainer_resume.pt")


def names_by_message(hub: Hub, name: str) -> list[tuple[str, list[str]]]:
    commits = hub.repository(name).branches["main"][1:]
    return [
        (commit.message, sorted(path for path in commit.files if path.rpartition("/")[2] not in OURS))
        for commit in commits
    ]


def without_card(kind: Any) -> Any:
    """A Trainer that writes no card: that of transformers needs a configuration, and the cards differ in their text.

    It waits for each push: the files of transformers' are those of the next save where that comes before they are sent.
    """

    def push_and_wait(self: Any, checkpoint_folder: str) -> None:
        kind._push_from_checkpoint(self, checkpoint_folder)
        if self.push_in_progress is not None:
            self.push_in_progress.wait_until_done()

    members = {"create_model_card": lambda self, **given: None, "_push_from_checkpoint": push_and_wait}
    return type("WithoutCard", (kind,), members)


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_commits_and_files_of_a_strategy_are_those_of_transformers(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    # It keeps its client, and with it the address of another test's Hub.
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)
    both: dict[str, Any] = {**PUSHING, "hub_strategy": strategy, "logging_strategy": "no"}
    ours = pushing_trainer(tmp_path / "ours", **both, hub_model_id="ours", kind=without_card(Trainer))
    theirs = without_card(transformers.Trainer)(
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
