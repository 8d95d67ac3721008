"""A process of a distributed training that pushes: `python -m tests.hub.pushing_process FOLDER`."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

# Allow requests to the local Hub only.
os.environ["HF_HUB_OFFLINE"] = "0"
assert os.environ["HF_ENDPOINT"].startswith("http://127.0.0.1:")

from littrainer import Trainer  # noqa: E402
from tests.hub.runs import pushing_trainer  # noqa: E402


class RecordingTrainer(Trainer):
    """A Trainer that records its pushes."""

    commits: list[Any]

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        commit = super().push_to_hub(*args, **kwargs)
        self.commits.append(commit if commit is None else commit.commit_message)
        return commit


def main(folder: Path) -> None:
    """Train, save and push, and write the commits of this process."""
    trainer = pushing_trainer(folder, kind=RecordingTrainer, hub_strategy="checkpoint")
    assert isinstance(trainer, RecordingTrainer)
    trainer.commits = []
    trainer.train()
    trainer.save_model()
    trainer.push_to_hub(commit_message="by hand")
    record = {"id": trainer.hub_model_id, "commits": trainer.commits, "step": trainer.state.global_step}
    (folder / f"{trainer.args.process_index}.pickle").write_bytes(pickle.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
