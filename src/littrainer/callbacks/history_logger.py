"""Where Lightning's callbacks log when no tracker is there: the Trainer's own history."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment

from littrainer.callbacks.published_metrics import COUNTS, is_number

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)


class _NothingIsKept(DummyExperiment):
    has_told = False

    def nop(self, *args: Any, **kwargs: Any) -> None:
        if not self.has_told:
            self.has_told = True
            logger.warning(
                "A Lightning callback writes to `logger.experiment`, and no tracker is there to keep that. Set "
                "report_to to the one it is made for."
            )


class HistoryLogger(Logger):
    """Adds what Lightning's callbacks log to `state.log_history`, which checkpoints keep and reports show.

    They may log at every micro-batch, and checkpoints would hold an entry for each. So only the newest values are kept,
    and added when the Trainer logs. Nothing is printed, and no event of the Trainer's callbacks comes of it.

    Parameters:
        trainer: the Trainer whose history it is.
    """

    def __init__(self, trainer: Trainer):
        super().__init__()
        self._trainer = trainer
        # Name -> the optimizer step at which it was logged last, and its value.
        self._newest: dict[str, tuple[int, float]] = {}
        self._experiment = _NothingIsKept()

    @property
    def name(self) -> str:
        """None, so that it makes no folder of callbacks that save."""
        return ""

    @property
    def version(self) -> str:
        """None, as there is no name."""
        return ""

    @property
    def experiment(self) -> Any:
        """Takes what callbacks write to the object of a service, as pictures, and keeps nothing of it; says so once."""
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep values until the Trainer logs; newer ones of a name take the place of older ones."""
        # Lightning's step is a number of batches in some cases. Its epoch counts complete ones only.
        now = self._trainer.state.global_step
        numbers = {name: value for name, value in metrics.items() if is_number(value) and name not in COUNTS}
        self._newest.update((name, (now, float(value))) for name, value in numbers.items())

    def add_to_history(self) -> None:
        """Add what is new to the history, as one entry for each optimizer step."""
        for step in sorted({step for step, _ in self._newest.values()}):
            values = {name: value for name, (of, value) in self._newest.items() if of == step}
            self._trainer.state.log_history.append({**values, "step": step})
        self._newest = {}

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the arguments are saved beside the model."""
