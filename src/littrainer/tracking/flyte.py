"""Flyte, within one of its tasks."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from littrainer.tracking.base import TrackerCallback, survives_failure
from littrainer.tracking.saved_models import newest_checkpoint

logger = logging.getLogger(__name__)

# What a table on a Deck takes beside flytekit itself.
DECK_MODULES = ("flytekitplugins.deck", "pandas")


class FlyteCallback(TrackerCallback):
    """Shows a training on a Deck of the Flyte task that it runs in, and saves its checkpoints there.

    Parameters:
        save_log_history: show everything logged as a table when training ends; takes flytekitplugins-deck-standard
            and pandas.
        sync_checkpoints: save each checkpoint, from which the task resumes after an interruption with
            `trainer.train(resume_from_checkpoint=current_context().checkpoint.restore())`.

    Raises:
        ImportError: flytekit is not installed.
    """

    service = "flyte"

    def __init__(self, save_log_history: bool = True, sync_checkpoints: bool = True) -> None:
        super().__init__()
        missing = [name for name in DECK_MODULES if not _is_importable(name)]
        if save_log_history and missing:
            logger.warning(
                "flyte: the log history is not shown, since %s is not installed: run `pip install "
                "flytekitplugins-deck-standard pandas`.",
                " and ".join(missing),
            )
        from flytekit import current_context

        self.cp: Any = current_context().checkpoint
        self.save_log_history = save_log_history and not missing
        self.sync_checkpoints = sync_checkpoints

    @survives_failure
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the checkpoint in the task."""
        wanted = self.sync_checkpoints and state.is_world_process_zero
        folder = newest_checkpoint(args, state, self.trial_folder) if wanted else None
        if folder is not None:
            self.cp.save(str(folder))

    @survives_failure
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show everything that was logged as a table on the Deck `Log History`."""
        if not self.save_log_history or not state.is_world_process_zero:
            return
        import pandas
        from flytekit import Deck
        from flytekitplugins.deck.renderer import TableRenderer

        Deck("Log History", TableRenderer().to_html(pandas.DataFrame(state.log_history)))


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        # The package it would lie in is missing.
        return False
