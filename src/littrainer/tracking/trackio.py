"""Trackio tracker, local or on a Hugging Face Space."""

from __future__ import annotations

import re
import secrets
from typing import Any

from littrainer.tracking.base import (
    TrackerCallback,
    collect_hyperparameters,
    drop_summary_values,
    rename_for_trackers,
    survives_failure,
)

SPACE_URL = "https://huggingface.co/spaces/"
SPACE_TAG = f"trackio:{SPACE_URL}"
BADGE_PICTURE = "https://raw.githubusercontent.com/gradio-app/trackio/refs/heads/main/trackio/assets/badge.png"
# The Hub allows 96 characters in a repository's name.
MAX_PROJECT_CHARACTERS = 81


class TrackioCallback(TrackerCallback):
    """Callback for Trackio, configured by `args.project`, `args.run_name` and the `trackio_*` arguments.

    Without `trackio_space_id`, or the environment variable TRACKIO_SPACE_ID, it writes to the local store.
    """

    service = "trackio"
    reports_predictions = True

    def __init__(self) -> None:
        super().__init__()
        import trackio

        self._trackio: Any = trackio
        self._space_id: str | None = None
        self._static_space_id: str | None = None
        self._run_name: str | None = None
        self._is_training_over = False

    def begin_training(self, args: Any, state: Any) -> None:
        if self._is_training_over:
            # An evaluation may have reopened the last run.
            if self._initialized and state.is_world_process_zero:
                self.release()
            self._initialized = self._is_training_over = False
            self._run_name = None

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        """Start or continue the run of that name, and write arguments and the model's configuration."""
        run = self._trackio.init(
            project=args.project,
            # Without a name of the user, do not use the trial's: Trackio would continue a run of another search.
            name=(self.run_name(args, state) if args.run_name or state.trial_name else None) or self._run_name,
            space_id=args.trackio_space_id,
            resume="allow",
            private=args.hub_private_repo,
            bucket_id=args.trackio_bucket_id,
        )
        self._run_name = run.name
        # The full name: the environment may set it, and the argument may lack the owner.
        self._space_id = self._trackio.context_vars.current_space_id.get()
        self._trackio.config.update(collect_hyperparameters(args, model), allow_val_change=True)
        if hasattr(model, "num_parameters"):
            self._trackio.config["model/num_parameters"] = model.num_parameters()

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        self._trackio.log({**drop_summary_values(logs), "train/global_step": state.global_step})

    def write_prediction_metrics(self, metrics: dict[str, Any], args: Any, state: Any) -> None:
        self._trackio.log(rename_for_trackers(metrics))

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        """Finish the run, and publish the Space's results statically, unless `trackio_static_space_id` is False."""
        self.release()
        if self._space_id and args.trackio_static_space_id is not False:
            name, private = self._get_static_space_name(args), args.hub_private_repo
            self._static_space_id = self._trackio.freeze(
                space_id=self._space_id, project=args.project, new_space_id=name, private=private
            )
            self._tag_model(model)

    def release(self) -> None:
        self._is_training_over = True
        try:
            self._trackio.finish()
        finally:
            self._initialized = False

    @survives_failure
    def on_push_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Publish local results as a static Space, unless `trackio_static_space_id` is False."""
        project = self._trackio.context_vars.current_project.get()
        is_local = not self._space_id and args.trackio_static_space_id is not False
        if not state.is_world_process_zero or project is None or not is_local:
            return
        self._static_space_id = self._trackio.sync(
            project=project,
            sdk="static",
            space_id=self._get_static_space_name(args),
            private=args.hub_private_repo,
            bucket_id=args.trackio_bucket_id,
            force=True,
        )
        self._tag_model(model)

    def card_badge(self) -> str | None:
        """Return a link to the Space that shows the run; None for a local run."""
        space = self._static_space_id or self._space_id
        return f"[![Trackio]({BADGE_PICTURE})]({SPACE_URL}{space})" if space else None

    def _get_static_space_name(self, args: Any) -> str:
        return self._static_space_id or args.trackio_static_space_id or make_static_space_name(args.project)

    def _tag_model(self, model: Any) -> None:
        # The Hub links the model to the Space in this tag.
        tags = [tag for tag in getattr(model, "model_tags", None) or [] if not str(tag).startswith(SPACE_TAG)]
        new_tags = ["trackio", f"{SPACE_TAG}{self._static_space_id or self._space_id}"]
        model.model_tags = tags + [tag for tag in new_tags if tag not in tags]


def make_static_space_name(project: str) -> str:
    """Make a unique name that the Hub accepts, with six random characters."""
    plain = re.sub(r"[^a-z0-9._]+|-+", "-", project.lower()).strip("-_.") or "trackio-project"
    return f"{plain[:MAX_PROJECT_CHARACTERS].rstrip('-')}-static-{secrets.token_hex(3)}"
