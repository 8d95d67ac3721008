from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from littrainer import TrainerCallback
from tests.scenarios.data import Stream, vector_rows
from tests.scenarios.trainers import quiet_trainer


def test_an_epoch_without_any_batch_ends_the_training_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class OnlyOnce(Stream):
        done = False

        def __iter__(self) -> Any:
            rows, self.done = [] if self.done else self.rows, True
            return iter([dict(row) for row in rows])

    trainer = quiet_trainer(tmp_path, trainer_kwargs={"train_dataset": OnlyOnce(vector_rows(8))}, max_steps=5)
    assert trainer.train().global_step == 2
    assert "no batch in this epoch" in caplog.text and "step 2 of 5" in caplog.text


def test_an_argument_set_after_construction_is_refused_when_training_begins(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.args.debug = "tpu_metrics_debug"
    with pytest.raises(NotImplementedError, match=r"debug=.*tpu_metrics_debug"):
        trainer.train()
    assert not trainer.is_in_train


def test_the_folder_follows_an_output_dir_that_a_callback_sets(tmp_path: Path) -> None:
    class Moves(TrainerCallback):
        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            args.output_dir = str(tmp_path / "moved")

    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [Moves()]}, max_steps=1)
    trainer.train()
    assert trainer.training_run.folder == str(tmp_path / "moved")
