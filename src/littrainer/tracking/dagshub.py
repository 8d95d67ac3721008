"""DagsHub, whose MLflow server gets the metrics and whose repository gets the files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from littrainer.tracking.base import survives_failure
from littrainer.tracking.mlflow import MLflowCallback
from littrainer.tracking.services import environment_says, require_installed


class DagsHubCallback(MLflowCallback):
    """Reports to the MLflow server of a DagsHub repository, as `MLflowCallback` does to any.

    Raises:
        ImportError: dagshub or MLflow is not installed.
    """

    service = "dagshub"

    def __init__(self) -> None:
        require_installed(self.service)
        super().__init__()
        from dagshub.upload import Repo

        self.Repo: Any = Repo
        self.repo: Any = None
        self.log_artifacts = False
        self.path = Path("artifacts")

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Start a run, as `MLflowCallback.setup` does.

        Environment variables beside those: MLFLOW_TRACKING_URI names the repository, and has to be set, as
        `dagshub.init()` does it; HF_DAGSHUB_LOG_ARTIFACTS uploads the output_dir when training ends, into the branch
        BRANCH (main by default).

        Raises:
            RuntimeError: MLFLOW_TRACKING_URI is not set, or names no repository.
        """
        self.log_artifacts = environment_says("HF_DAGSHUB_LOG_ARTIFACTS")
        self.name = os.environ.get("HF_DAGSHUB_MODEL_NAME") or "main"
        self.remote = os.environ.get("MLFLOW_TRACKING_URI")
        if not self.remote:
            raise RuntimeError("MLFLOW_TRACKING_URI is not set; call dagshub.init(repo_owner=..., repo_name=...)")
        owner, _, repository = self.remote.rstrip("/").rpartition("/")
        owner = owner.rpartition("/")[2]
        if not owner or not repository:
            raise RuntimeError(f"MLFLOW_TRACKING_URI={self.remote!r} does not end in /OWNER/REPOSITORY.mlflow")
        self.repo = self.Repo(owner=owner, name=repository.partition(".")[0], branch=os.environ.get("BRANCH") or "main")
        super().setup(args, state, model, **kwargs)

    @survives_failure
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upload the output_dir, where HF_DAGSHUB_LOG_ARTIFACTS asks for it, and end the run."""
        if self.log_artifacts and state.is_world_process_zero:
            self.repo.directory(str(self.path)).add_dir(args.output_dir)
        super().on_train_end(args, state, control, **kwargs)
