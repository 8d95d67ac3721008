"""What Lightning's callbacks show of a Trainer's work, and what they get of its single batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    SpikeDetection,
    TQDMProgressBar,
)

from littrainer import Trainer
from tests.callbacks.test_lightning_callbacks import trainer_with
from tests.scenarios.data import Rows, vector_rows


def test_bars_show_how_many_batches_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    totals: dict[str, set[Any]] = {}

    class Noting(TQDMProgressBar):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            totals.setdefault("train", set()).add(self.train_progress_bar.total)

        def on_validation_batch_end(self, *args: Any) -> None:
            super().on_validation_batch_end(*args)
            totals.setdefault("validation", set()).add(self.val_progress_bar.total)

        def on_predict_batch_end(self, *args: Any) -> None:
            super().on_predict_batch_end(*args)
            totals.setdefault("prediction", set()).add(self.predict_progress_bar.total)

    trainer = trainer_with(tmp_path, Noting(), num_train_epochs=1, eval_strategy="epoch", disable_tqdm=False)
    trainer.train()
    trainer.evaluate()
    trainer.predict(Rows(vector_rows(5)))
    assert totals == {"train": {3}, "validation": {3}, "prediction": {2}}
    assert "eval_loss" in capsys.readouterr().out


@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_a_prediction_writer_gets_predictions_and_where_their_samples_stand(tmp_path: Path, interval: Any) -> None:
    written: list[Any] = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, places: Any, *_: Any) -> None:
            written.append((prediction, places))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, places: Any) -> None:
            written.extend(zip(predictions, places[0], strict=True))

    predicted = trainer_with(tmp_path, Writer(interval)).predict(Rows(vector_rows(7))).predictions
    assert [places for _, places in written] == [[0, 1, 2], [3, 4, 5], [6]]
    assert torch.equal(torch.cat([one for one, _ in written]), torch.tensor(predicted))


def test_spike_detection_ends_training_at_a_loss_that_jumps(tmp_path: Path) -> None:
    class Jumping(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found: Any = super().compute_loss(*args, **kwargs)
            return found * 1000 if self.state.global_step == 2 else found

    trainer = trainer_with(tmp_path, SpikeDetection(), kind=Jumping, num_train_epochs=1)
    with pytest.raises(RuntimeError, match="spike detected in batch 2"):
        trainer.train()
    assert (tmp_path / "skip_batches.json").is_file()
