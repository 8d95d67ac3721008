"""`fast_dev_run`: a whole script in a few batches, without traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from littrainer import EarlyStoppingCallback, Trainer, TrainerCallback
from littrainer.tracking.tensorboard import TensorBoardCallback
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

EVERYTHING: dict[str, Any] = {
    "num_train_epochs": 5,
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}


class EventRecorder(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append("step")
        control.should_save = control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append("evaluation")
        control.should_save = True

    def on_save(self, *_: Any, **__: Any) -> None:
        self.events.append("save")


@pytest.mark.parametrize(
    ("kind", "number", "steps", "sizes"), [(Trainer, True, 1, [4]), (StepwiseTrainer, 3, 2, [4, 4, 4])]
)
def test_a_run_is_a_short_epoch_with_an_evaluation(
    tmp_path: Path, kind: type[Trainer], number: Any, steps: int, sizes: list[int]
) -> None:
    rows: list[tuple[bool, int]] = []

    class Counting(VectorClassifier):
        def forward(self, x: Any, labels: Any = None) -> Any:
            rows.append((self.training, len(x)))
            return super().forward(x, labels)

    recorder = EventRecorder()
    options = {"callbacks": [recorder, EarlyStoppingCallback()]}
    trainer = quiet_trainer(
        tmp_path,
        Counting(),
        rows=20,
        kind=kind,
        trainer_kwargs=options,
        lightning={"fast_dev_run": number},
        **EVERYTHING,
    )
    before = dict(vars(trainer.args))
    assert trainer.train().global_step == steps
    assert [size for training, size in rows if training] == sizes
    assert [size for training, size in rows if not training] == [3, 3, 1][: int(number)]
    assert recorder.events == ["step"] * steps + ["evaluation"]
    assert list(tmp_path.iterdir()) == [] and vars(trainer.args) == before
    assert sum("loss" in entry for entry in trainer.state.log_history) == steps
    rows.clear()
    trainer.predict(trainer.eval_dataset)
    assert len(rows) == int(number)


def test_lightning_callbacks_that_save_or_stop_are_disabled(tmp_path: Path) -> None:
    class CountingMonitor(LearningRateMonitor):
        steps = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.steps += 1

    saving, stopping, watching = ModelCheckpoint(every_n_train_steps=1), EarlyStopping("eval_loss"), CountingMonitor()
    trainer = quiet_trainer(
        tmp_path,
        trainer_kwargs={"callbacks": [saving, stopping, watching], "lightning": {"fast_dev_run": True}},
        eval_strategy="epoch",
    )
    trainer.train()
    assert saving.best_model_path == "" and stopping.wait_count == 0 and watching.steps == 1
    assert list(tmp_path.iterdir()) == []


def test_trackers_and_loggers_get_no_logs(tmp_path: Path) -> None:
    class Tracker(TensorBoardCallback):
        logs = 0

        def on_log(self, *_: Any, **__: Any) -> None:
            type(self).logs += 1

    tracker, loggers = Tracker(), CSVLogger(str(tmp_path / "csv"))
    lightning = {"fast_dev_run": True, "logger": loggers}
    trainer = quiet_trainer(
        tmp_path / "run",
        trainer_kwargs={"callbacks": [TrainerCallback(), tracker, EventRecorder()], "lightning": lightning},
        report_to="tensorboard",
        logging_strategy="steps",
        logging_steps=1,
    )
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    trainer.train()
    assert Tracker.logs == 0 and not (tmp_path / "csv").exists()
    assert list((tmp_path / "run").iterdir()) == []
    assert [type(callback).__name__ for callback in trainer.callback_handler.callbacks] == names
    trainer.lightning_keywords.clear()
    trainer.train()
    assert Tracker.logs > 0


def test_only_pushes_of_the_script_reach_the_hub(tmp_path: Path) -> None:
    class RecordingTrainer(Trainer):
        calls: ClassVar[list[str]] = []

        def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
            self.calls.append("repository")

        def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
            self.calls.append("push")

    for lightning, expected in (({"fast_dev_run": True}, []), (None, ["repository", "push"])):
        trainer = quiet_trainer(tmp_path, kind=RecordingTrainer, lightning=lightning, max_steps=1, push_to_hub=True)
        trainer.train()
        trainer.save_model()
        assert RecordingTrainer.calls == expected


def test_a_run_is_logged_once_does_not_resume_and_needs_no_evaluation_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet_trainer(tmp_path, lightning={"fast_dev_run": 2})
    trainer.train()
    trainer.evaluate()
    assert sum("fast_dev_run: a trial, with 2 batch(es)" in message for message in caplog.messages) == 1
    with pytest.raises(ValueError, match=r"tries a training out from its beginning, .* leave one of them out"):
        trainer.train(resume_from_checkpoint=True)
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"eval_dataset": None}, lightning={"fast_dev_run": True})
    assert trainer.train().global_step == 1
    assert not any("eval_loss" in entry for entry in trainer.state.log_history)
