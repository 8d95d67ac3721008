"""The validations and tests of a module: one round for each loader, and what is logged when all have ended."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from littrainer.data.stream_end import check_equal_lengths
from littrainer.evaluation.streaming import StreamingMetrics
from littrainer.plain_lightning.evaluation_round import EvaluationRound
from littrainer.plain_lightning.model_inputs import model_inputs
from littrainer.plain_lightning.names import TEST, loader_at, numbers_in, prefix_and_suffix, with_prefixes

if TYPE_CHECKING:
    from littrainer.plain_lightning.module import TransformersModule


class Evaluations:
    """What is kept of the evaluation at hand.

    Parameters:
        streaming: metrics that are updated batch by batch; None where `compute_metrics` is a function or absent.
    """

    def __init__(self, streaming: StreamingMetrics | None):
        self._streaming = streaming
        self._round: tuple[int, EvaluationRound] | None = None
        self._waiting: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module does not go on with the evaluation at hand.
        return {"_streaming": self._streaming, "_round": None, "_waiting": {}}

    def begin(self, trainer: Any, stage: str) -> None:
        """No batch has been seen yet; all processes call this.

        Raises:
            UnequalData: the processes have differently many batches, and would wait for each other for ever.
        """
        self._round, self._waiting = None, {}
        for number in _batch_counts(trainer, stage):
            is_known = math.isfinite(number)
            check_equal_lengths(
                range(int(number)) if is_known else None, "data of a test" if stage == TEST else "data of a validation"
            )

    def step(self, module: TransformersModule, stage: str, loaders: Any, batch: Any, index: int) -> dict[str, Any]:
        """Take in one batch.

        Parameters:
            stage: `val` or `test`.
            loaders: what the hook of the data gave.
            index: place of the batch's loader among them.
        """
        if self._round is None or self._round[0] != index:
            self._finish_round(stage, loaders)
            self._round = index, EvaluationRound(module, loader_at(loaders, index), self._streaming)
        inputs = model_inputs(batch)
        value, predictions, labels = module.prediction_outputs(inputs)
        self._round[1].add(inputs, value, predictions, labels)
        return {"loss": value, "predictions": predictions, "labels": labels}

    def end(self, module: TransformersModule, stage: str, loaders: Any) -> None:
        """The last batch has been seen: log loss and metrics."""
        self._finish_round(stage, loaders)
        numbers, self._waiting = numbers_in(self._waiting), {}
        # All processes have the same; Lightning is told to average them, or it would warn.
        is_shared = module.trainer.world_size > 1
        module.log_dict(numbers, prog_bar=True, add_dataloader_idx=False, sync_dist=is_shared, batch_size=1)

    def _finish_round(self, stage: str, loaders: Any) -> None:
        if self._round is None:
            return
        (index, evaluation_round), self._round = self._round, None
        self._waiting.update(with_prefixes(*prefix_and_suffix(stage, loaders, index), evaluation_round.finish()))


def _batch_counts(trainer: Any, stage: str) -> list[float]:
    if stage == TEST:
        counts = trainer.num_test_batches
    else:
        counts = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
    return list(counts) if isinstance(counts, (list, tuple)) else [counts]
