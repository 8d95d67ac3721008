"""Where in the dataset predicted samples stand, for Lightning's prediction writers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from littrainer.callbacks.lightning_callbacks import is_one_of

if TYPE_CHECKING:
    import lightning.pytorch as pl


def note_places(lightning_trainer: pl.Trainer, places: list[int] | None) -> None:
    """Tell writers the places of the batch that was predicted last.

    Lightning knows them for samplers of its own only, and writers look where it would note them.

    Parameters:
        places: numbers of samples; None where they are not known.
    """
    loop, known = lightning_trainer.predict_loop, places or []
    loop.current_batch_indices = known
    writers = [one for one in lightning_trainer.callbacks if is_one_of(one, "BasePredictionWriter")]  # type: ignore[attr-defined]
    if any(writer.interval.on_epoch for writer in writers):
        loop.epoch_batch_indices[0].append(known)
