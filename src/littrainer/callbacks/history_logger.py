"""Where Lightning's callbacks log when no tracker is there: the Trainer's own history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger

from littrainer.callbacks.published_metrics import is_number

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


class HistoryLogger(Logger):
    """Adds what Lightning's callbacks log to `state.log_history`, which checkpoints keep and reports show.

    Nothing is printed, and no event of the Trainer's callbacks comes of it: monitors log at every micro-batch.

    Parameters:
        trainer: the Trainer whose history it is.
    """

    def __init__(self, trainer: Trainer):
        super().__init__()
        self._trainer = trainer
        self._entry: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """None, so that it makes no folder of callbacks that save."""
        return ""

    @property
    def version(self) -> str:
        """None, as there is no name."""
        return ""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add values to the history; those of one step in a row are one entry of it."""
        history = self._trainer.state.log_history
        # The epoch that Lightning adds counts complete ones only.
        values = {name: float(value) for name, value in metrics.items() if is_number(value) and name != "epoch"}
        step = self._trainer.state.global_step if step is None else step
        if history and history[-1] is self._entry and self._entry["step"] == step:
            self._entry.update(values)
        else:
            self._entry = {**values, "step": step}
            history.append(self._entry)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the arguments are saved beside the model."""
