"""Each of Lightning's callbacks works in a Trainer, or is refused."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)

from littrainer import ProgressCallback, Trainer, TrainerCallback
from littrainer.callbacks.lightning_callbacks import REFUSED
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

BOTH_MODES = pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
EVERY_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}


def trainer_with(
    folder: Path, *callbacks: Any, trainer_kwargs: dict[str, Any] | None = None, **changes: Any
) -> Trainer:
    keywords = {"callbacks": list(callbacks), "compute_metrics": accuracy, **(trainer_kwargs or {})}
    return quiet_trainer(folder, trainer_kwargs=keywords, **changes)


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# ---- The table -------------------------------------------------------------------------------------------------------


def test_the_page_says_of_every_callback_that_lightning_has_whether_it_works() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "callbacks.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ((?:yes|no) \| .*) \|$", page, re.MULTILINE))
    assert set(rows) == set(lightning_callbacks.__all__)
    for refusal in REFUSED:
        assert refusal.instead in rows[refusal.name]
        assert rows[refusal.name].startswith("no" if refusal.applies is None else "yes")


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (LearningRateFinder(), r"trainer.lr_find\(\) before training, and set learning_rate"),
        (BatchSizeFinder, r"trainer.scale_batch_size\(\) before training"),
        (type("CustomFinder", (BatchSizeFinder,), {}), "auto_find_batch_size=True"),
        (GradientAccumulationScheduler({0: 2}), "set gradient_accumulation_steps, or train a TransformersModule"),
    ],
)
def test_an_unsupported_callback_is_refused_with_the_remedy(tmp_path: Path, callback: Any, instead: str) -> None:
    with pytest.raises(ValueError, match=f"cannot work in a Trainer: .* Instead, .*{instead}"):
        trainer_with(tmp_path, callback)
    trainer = trainer_with(tmp_path)
    with pytest.raises(ValueError, match="cannot work in a Trainer"):
        trainer.add_callback(callback)
    assert trainer.lightning_callbacks == []


class BatchNormClassifier(VectorClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = torch.nn.BatchNorm1d(8)


SWA = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
BEST: dict[str, Any] = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1, **EVERY_STEP}


@pytest.mark.parametrize(
    ("callback", "changes", "message"),
    [
        (SWA, BEST, "load_best_model_at_end=False"),
        (WeightAveraging(), BEST, "load_best_model_at_end=False"),
        (SWA, {"model": BatchNormClassifier()}, "batch norm"),
        (ModelPruning("l1_unstructured", amount=0.5), {"save_strategy": "epoch"}, 'save_strategy="no"'),
        (EarlyStopping("eval_loss"), {}, 'set eval_strategy="steps"'),
        (EarlyStopping("val_loss"), EVERY_STEP, "Set monitor='eval_loss'"),
    ],
)
def test_unsupported_settings_for_a_callback_are_an_error_before_training(
    tmp_path: Path, callback: Any, changes: dict[str, Any], message: str
) -> None:
    trainer = trainer_with(tmp_path, callback, max_steps=1, **changes)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


# ---- The list --------------------------------------------------------------------------------------------------------


def test_lightning_callbacks_are_removed_like_trainer_callbacks(tmp_path: Path) -> None:
    timer, summary = Timer(), ModelSummary()
    trainer = trainer_with(tmp_path, timer, TrainerCallback(), summary)
    trainer.add_callback(LearningRateMonitor)
    assert trainer.pop_callback(Timer) is timer and trainer.pop_callback(Timer) is None
    assert trainer.pop_callback(timer) is None and trainer.pop_callback(summary) is summary
    trainer.add_callback(timer)
    trainer.remove_callback(timer)
    trainer.remove_callback(LearningRateMonitor)
    trainer.remove_callback(LearningRateMonitor)
    assert trainer.lightning_callbacks == []
    with pytest.raises(ValueError, match="does not have the callback"):
        trainer.remove_callback(timer)


def test_a_lightning_progress_bar_replaces_the_trainers(tmp_path: Path) -> None:
    shown = [
        trainer.pop_callback(ProgressCallback) is not None
        for trainer in (
            trainer_with(tmp_path, TQDMProgressBar(), disable_tqdm=False),
            trainer_with(tmp_path, Timer(), disable_tqdm=False),
        )
    ]
    assert shown == [False, True]


# ---- Monitors --------------------------------------------------------------------------------------------------------


def test_throughput_monitor_counts_the_samples_of_training_and_evaluation(tmp_path: Path) -> None:
    def samples_of(batch: Any) -> int:
        return len(getattr(batch, "inputs", batch)["labels"])

    trainer = trainer_with(tmp_path, ThroughputMonitor(batch_size_fn=samples_of), num_train_epochs=1, **EVERY_STEP)
    trainer.train()
    assert logged(trainer, "train/samples") == [4, 8, 10]
    assert logged(trainer, "validate/samples") == [7] * 3


@BOTH_MODES
def test_early_stopping_monitors_an_evaluation(tmp_path: Path, kind: Any) -> None:
    stopping = EarlyStopping("eval_loss", mode="max", patience=2)
    trainer = trainer_with(tmp_path, stopping, kind=kind, num_train_epochs=3, **EVERY_STEP)
    trainer.train()
    losses = logged(trainer, "eval_loss")
    assert trainer.state.global_step == 3 and max(losses) == losses[0] == stopping.best_score.item()
    assert stopping.wait_count == 2 and trainer.control.should_training_stop


def test_several_datasets_are_a_single_validation_for_a_monitoring_callback(tmp_path: Path) -> None:
    stopping = EarlyStopping("eval_b_loss", mode="max", patience=10)
    ends: list[set[str]] = []

    class RecordsEnds(pl.Callback):
        def on_validation_start(self, *_: Any) -> None:
            ends.append(set())

        def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
            ends[-1].update(name for name in trainer.callback_metrics if name.endswith("_accuracy"))

    datasets = {"a": Rows(vector_rows(3)), "b": Rows(vector_rows(4))}
    trainer = trainer_with(
        tmp_path, stopping, RecordsEnds(), trainer_kwargs={"eval_dataset": datasets}, max_steps=1, **EVERY_STEP
    )
    trainer.train()
    assert stopping.best_score.item() == logged(trainer, "eval_b_loss")[0] and stopping.wait_count == 0
    assert ends == [{"eval_a_accuracy"}, {"eval_a_accuracy", "eval_b_accuracy"}]


class AddsAMetric(Trainer):
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        assert output.metrics is not None
        output.metrics["eval_custom"] = float(self.state.global_step)
        return output


class LogsAMetric(pl.Callback):
    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        module.log("val_custom", float(trainer.global_step))


@pytest.mark.parametrize(("monitor", "kind"), [("eval_custom", AddsAMetric), ("val_custom", Trainer)])
def test_metrics_that_a_subclass_or_another_callback_adds_can_be_monitored(
    tmp_path: Path, monitor: str, kind: type[Trainer]
) -> None:
    stopping = EarlyStopping(monitor, patience=1)
    trainer = trainer_with(tmp_path, LogsAMetric(), stopping, kind=kind, num_train_epochs=2, **EVERY_STEP)
    assert trainer.train().global_step == 2 and stopping.best_score.item() == 1.0


@BOTH_MODES
def test_model_checkpoint_saves_the_best_and_the_trainer_resumes_from_it(tmp_path: Path, kind: Any) -> None:
    def steps_so_far(_: Any) -> dict[str, float]:
        return {"accuracy": -abs(trainer.state.global_step - 3)}

    checkpoint = ModelCheckpoint(monitor="eval_accuracy", mode="max", save_top_k=1)
    kwargs = {"compute_metrics": steps_so_far}
    trainer = trainer_with(tmp_path, checkpoint, kind=kind, trainer_kwargs=kwargs, num_train_epochs=2, **EVERY_STEP)
    trainer.train()
    assert checkpoint.best_model_score == 0 and Path(checkpoint.best_model_path).parent == tmp_path / "checkpoints"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch=0-step=3.ckpt"]
    resumed = trainer_with(tmp_path, kind=kind, num_train_epochs=2)
    resumed.train(resume_from_checkpoint=checkpoint.best_model_path)
    for expected, actual in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_the_trainer_resumes_from_an_on_exception_checkpoint(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise OverflowError

    trainer = trainer_with(tmp_path, OnExceptionCheckpoint(str(tmp_path), "last"), Failing(), num_train_epochs=1)
    with pytest.raises(OverflowError):
        trainer.train()
    resumed = trainer_with(tmp_path, num_train_epochs=1)
    assert resumed.train(resume_from_checkpoint=str(tmp_path / "last.ckpt")).global_step == 3
    assert resumed._initial_global_step == 2


# ---- What changes the model ------------------------------------------------------------------------------------------


class WeightsAtEpochStarts(TrainerCallback):
    def __init__(self) -> None:
        self.weights: list[list[torch.Tensor]] = []

    def on_epoch_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.weights.append([parameter.detach().clone() for parameter in model.parameters()])


@BOTH_MODES
def test_averaged_weights_are_those_of_the_model_after_training(tmp_path: Path, kind: Any) -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    starts = WeightsAtEpochStarts()
    trainer = trainer_with(
        tmp_path, averaging, starts, kind=kind, num_train_epochs=3, logging_strategy="steps", logging_steps=1
    )
    trainer.train()
    # Lightning averages the weights at epoch starts from swa_epoch_start (counted from 1) on.
    expected = [torch.stack(both).mean(0) for both in zip(*starts.weights[1:], strict=True)]
    for parameter, mean in zip(trainer.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), mean)
    rates = logged(trainer, "learning_rate")
    assert rates[-1] == 0.05 and rates[3:6] == [rates[3]] * 3


@pytest.mark.parametrize(
    "callback", [EMAWeightAveraging(), SWA, ModelPruning("l1_unstructured", amount=0.5, prune_on_train_epoch_end=False)]
)
def test_evaluations_outside_of_training_use_the_current_weights(tmp_path: Path, callback: Any) -> None:
    trainer = trainer_with(tmp_path, callback, num_train_epochs=1)
    trainer.train()
    with torch.no_grad():
        trainer.model.head.weight.mul_(2)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    evaluated = trainer.evaluate()["eval_loss"]
    assert evaluated == trainer_with(tmp_path, model=trainer.model).evaluate()["eval_loss"]
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.model.parameters(), strict=True))


@BOTH_MODES
def test_evaluations_use_averaged_weights_and_training_continues_with_trained_weights(
    tmp_path: Path, kind: Any
) -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    trainer = trainer_with(tmp_path, averaging, kind=kind, num_train_epochs=1, **EVERY_STEP)
    trainer.train()
    plain = trainer_with(tmp_path, kind=kind, num_train_epochs=1, **EVERY_STEP)
    plain.train()
    # The first update initializes the average.
    averaged, expected = logged(trainer, "eval_loss"), logged(plain, "eval_loss")
    assert averaged[0] == expected[0] and averaged[1] != expected[1]
    assert logged(trainer, "train_loss") == logged(plain, "train_loss")
    assert trainer.evaluate()["eval_loss"] == averaged[-1]


@BOTH_MODES
def test_fine_tuning_callbacks_freeze_and_unfreeze(tmp_path: Path, kind: Any) -> None:
    class Later(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.model.inner)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            before.append(pl_module.model.inner.weight.detach().clone())
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.model.inner, optimizer, lr=0.003)

    before: list[torch.Tensor] = []
    trainer = trainer_with(tmp_path, Later(), kind=kind, num_train_epochs=2)
    trainer.train()
    assert torch.equal(before[0], before[1]) and not torch.equal(before[1], trainer.model.inner.weight)
    assert trainer.get_learning_rates() == [0.0, 0.0, 0.003]


def test_backbone_fine_tuning_finds_the_backbone_or_says_that_there_is_none(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = VectorClassifier()
    model.backbone = model.inner
    frozen = [parameter.clone() for parameter in model.inner.parameters()]
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=5)
    trainer_with(tmp_path, callback, model=model, max_steps=2).train()
    assert all(torch.equal(one, other) for one, other in zip(frozen, model.inner.parameters(), strict=True))
    with pytest.raises(ValueError, match="neither a `backbone`"):
        trainer_with(tmp_path, BackboneFinetuning(), max_steps=1).train()


def test_a_pruned_model_is_plain_again_after_training(tmp_path: Path) -> None:
    trainer = trainer_with(
        tmp_path, ModelPruning("l1_unstructured", amount=0.5, parameter_names=["weight"]), max_steps=3
    )
    trainer.train()
    weights = [parameter for name, parameter in trainer.model.named_parameters() if name.endswith("weight")]
    assert torch.cat([weight.flatten() for weight in weights]).eq(0).float().mean() == 0.5
    assert set(trainer.model.state_dict()) == set(VectorClassifier().state_dict())


# ---- When to stop ----------------------------------------------------------------------------------------------------


def test_a_timer_ends_training_at_an_optimizer_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(lightning_callbacks.timer, "time", type("Clock", (), {"monotonic": lambda: next(clock)}))
    timer = Timer(duration={"seconds": 4})
    trainer = trainer_with(tmp_path, timer, max_steps=50, per_device_train_batch_size=1, gradient_accumulation_steps=3)
    trainer.train()
    assert 0 < trainer.state.global_step < 4 and trainer.state.log_history[-1]["train_loss"] > 0
    assert time.monotonic is not lightning_callbacks.timer.time.monotonic


@BOTH_MODES
def test_a_callback_that_stops_within_a_window_stops_training_when_it_is_complete(tmp_path: Path, kind: Any) -> None:
    class Stopping(pl.Callback):
        def on_train_batch_end(
            self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            trainer.should_stop = True

    trainer = trainer_with(
        tmp_path,
        Stopping(),
        kind=kind,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    assert trainer.train().global_step == 1
    assert trainer.lightning_trainer is not None and trainer.lightning_trainer.global_step == 1


def test_the_keyword_max_time_ends_training_too(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, trainer_kwargs={"lightning": {"max_time": {"seconds": 0}}}, max_steps=5)
    assert trainer.train().global_step == 0


# ---- What they are shown ---------------------------------------------------------------------------------------------


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
def test_a_prediction_writer_gets_predictions_and_sample_indices(tmp_path: Path, interval: Any) -> None:
    written: list[Any] = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer: pl.Trainer, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
            written.append((prediction, indices))

        def write_on_epoch_end(self, trainer: pl.Trainer, module: Any, predictions: Any, indices: Any) -> None:
            written.extend(zip(predictions, indices[0], strict=True))

    predicted = trainer_with(tmp_path, Writer(interval)).predict(Rows(vector_rows(7))).predictions
    assert [indices for _, indices in written] == [[0, 1, 2], [3, 4, 5], [6]]
    assert torch.equal(torch.cat([prediction for prediction, _ in written]), torch.tensor(predicted))


def test_spike_detection_ends_training_at_a_loss_that_jumps(tmp_path: Path) -> None:
    class Jumping(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss: Any = super().compute_loss(*args, **kwargs)
            return loss * 1000 if self.state.global_step == 2 else loss

    trainer = trainer_with(tmp_path, SpikeDetection(), kind=Jumping, num_train_epochs=1)
    with pytest.raises(RuntimeError, match="spike detected in batch 2"):
        trainer.train()
    assert (tmp_path / "skip_batches.json").is_file()
