"""One of two processes that train together and push: `python -m tests.hub.pushing_process FOLDER`."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

# Its one network is the local Hub, whose address HF_ENDPOINT has.
os.environ["HF_HUB_OFFLINE"] = "0"
assert os.environ["HF_ENDPOINT"].startswith("http://127.0.0.1:")

from littrainer import Trainer  # noqa: E402
from littrainer.hub import push_to_hub as pushing  # noqa: E402
from littrainer.hub.uploads import Upload  # noqa: E402
from tests.hub.runs import pushing_trainer  # noqa: E402
from tests.scenarios.other_processes import wait_until  # noqa: E402

SIGNS = 3


class Counting(Trainer):
    """Notes what it is asked to push."""

    commits: list[Any]

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        commit = super().push_to_hub(*args, **kwargs)
        self.commits.append(commit if commit is None else commit.commit_message)
        return commit


def wait_for_signs(folder: Path, rank: int) -> None:
    """Let the last push end only when the second process has heard several times that the first one still pushes."""
    told = folder / "told"
    agreed, send = pushing.agreed, Upload.send
    heard: list[bool] = []

    def hearing(flag: bool) -> bool:
        heard.append(agreed(flag))
        if rank == 1 and heard.count(True) == SIGNS:
            told.touch()
        return heard[-1]

    def slow_send(self: Upload) -> Any:
        if self.message.endswith("step 6, checkpoint"):
            wait_until(told.exists, "the second process has heard several times that the first one still pushes")
        return send(self)

    pushing.LONGEST_SILENCE_SECONDS = 0.05
    pushing.agreed = hearing
    Upload.send = slow_send  # type: ignore[method-assign]


def main(folder: Path) -> None:
    """Train, save and push, and write what this process saw."""
    wait_for_signs(folder, int(os.environ["RANK"]))
    trainer = pushing_trainer(folder, kind=Counting, hub_strategy="checkpoint")
    assert isinstance(trainer, Counting)
    trainer.commits = []
    trainer.train()
    trainer.save_model()
    trainer.push_to_hub(commit_message="by hand")
    found = {"id": trainer.hub_model_id, "commits": trainer.commits, "step": trainer.state.global_step}
    (folder / f"{trainer.args.process_index}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
