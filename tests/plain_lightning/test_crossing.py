from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from littrainer import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerDataModule,
    TrainingArguments,
    TransformersModule,
)
from tests.plain_lightning.crossed import (
    BEHIND,
    QUIET,
    STEPS,
    StopsLightningAt,
    check_same,
    fresh_model,
    stopped,
    there_and_back,
    trainer_of,
    weights_of,
)
from tests.scenarios.collators import pad_translations
from tests.scenarios.data import Rows, Stream, translation_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bart
from tests.scenarios.trainers import QUIET_RUN, quiet_trainer

# Before any training, at the end of an epoch, in the middle of one, and when all is done.
STOPS = (0, 2, 3, STEPS)


@pytest.mark.parametrize("step", STOPS)
def test_a_lightning_trainer_goes_on_where_the_trainer_stands(tmp_path: Path, step: int) -> None:
    trainer = stopped(trainer_of(tmp_path), step)
    module, datamodule, lightning_trainer = trainer.to_lightning()
    lightning_trainer.fit(module, datamodule=datamodule)
    assert module.model is trainer.model
    assert lightning_trainer.global_step == STEPS
    check_same(trainer.model)


@pytest.mark.parametrize("step", STOPS)
def test_a_trainer_goes_on_where_the_lightning_trainer_stands(tmp_path: Path, step: int) -> None:
    module, datamodule, lightning_trainer = trainer_of(tmp_path).to_lightning(callbacks=[StopsLightningAt(step)])
    if step:
        lightning_trainer.fit(module, datamodule=datamodule)
    trainer = Trainer.from_lightning(module, datamodule, lightning_trainer)
    assert (trainer.model, trainer.state.global_step) == (module.model, step)
    assert trainer.state.epoch == pytest.approx(BEHIND[step] / 6)
    assert trainer.train().global_step == STEPS
    check_same(trainer.model)
    assert not list(tmp_path.glob("from-lightning*"))


@pytest.mark.parametrize(
    ("changes", "micro_batches"),
    [
        ({}, 18),
        ({"given": {"lightning": {"limit_train_batches": 5}}}, 15),
        ({"given": {"train_dataset": Stream(vector_rows(24))}, "max_steps": 7}, 14),
    ],
    ids=["a dataset", "a part of each epoch", "a stream"],
)
def test_there_and_back_again_changes_nothing(tmp_path: Path, changes: dict[str, Any], micro_batches: int) -> None:
    stayed, crossed = there_and_back(tmp_path, **changes)
    assert len(stayed[0]) == micro_batches
    assert stayed == crossed


def test_an_optimizer_and_a_schedule_of_ones_own_go_on_over_there(tmp_path: Path) -> None:
    def trainer(folder: str) -> Any:
        model = fresh_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        return trainer_of(tmp_path / folder, model, {"optimizers": (optimizer, schedule)})

    whole = trainer("whole")
    whole.train()
    crossing = stopped(trainer("crossing"), 3)
    module, datamodule, lightning_trainer = crossing.to_lightning()
    lightning_trainer.fit(module, datamodule=datamodule)
    assert lightning_trainer.optimizers == [crossing.optimizer]
    assert lightning_trainer.lr_scheduler_configs[0].scheduler is crossing.lr_scheduler
    check_same(crossing.model, whole.model)


def test_a_longer_training_over_there_has_the_schedule_of_a_longer_training(tmp_path: Path) -> None:
    trainer_of(tmp_path, save_strategy="steps", save_steps=3).train()
    longer = trainer_of(tmp_path, num_train_epochs=5)
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    crossing = stopped(trainer_of(tmp_path), 3)
    crossing.model.losses = []
    module, datamodule, lightning_trainer = crossing.to_lightning(max_epochs=5)
    lightning_trainer.fit(module, datamodule=datamodule)
    assert lightning_trainer.global_step == 10
    check_same(module.model, longer.model)


def test_a_trainer_that_generates_goes_there_and_back(tmp_path: Path) -> None:
    rows, settings = Rows(translation_rows(10)), {"predict_with_generate": True, "generation_max_length": 5}

    def trainer(folder: str) -> Any:
        torch.manual_seed(0)
        args = Seq2SeqTrainingArguments(str(tmp_path / folder), **{**QUIET_RUN, **settings, "num_train_epochs": 1})
        return Seq2SeqTrainer(tiny_bart(), args, data_collator=pad_translations, train_dataset=rows, eval_dataset=rows)

    whole = trainer("whole")
    whole.train()
    crossing = stopped(trainer("crossing"), 1)
    module, datamodule, lightning_trainer = crossing.to_lightning(callbacks=[StopsLightningAt(2)])
    lightning_trainer.fit(module, datamodule=datamodule)
    with pytest.raises(ValueError, match=r"call Seq2SeqTrainer\.from_lightning"):
        Trainer.from_lightning(module, datamodule, lightning_trainer)
    back = Seq2SeqTrainer.from_lightning(module, datamodule, lightning_trainer)
    assert back.train().global_step == 3
    assert weights_of(back.model) == weights_of(whole.model)
    assert back.predict(rows).predictions.tolist() == whole.predict(rows).predictions.tolist()


def test_the_other_side_evaluates_logs_and_saves_when_the_arguments_say_so(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 0.5}
    trainer = trainer_of(tmp_path, save_total_limit=1, max_grad_norm=0.3, bf16=True, **settings)
    _, _, lightning_trainer = trainer.to_lightning(max_time={"hours": 1})
    saver = lightning_trainer.checkpoint_callback
    assert isinstance(saver, pl.callbacks.ModelCheckpoint)
    assert (saver.dirpath, saver._every_n_train_steps, saver.save_top_k) == (str(tmp_path), 3, 1)
    assert (lightning_trainer.val_check_interval, lightning_trainer.check_val_every_n_epoch) == (8, None)
    assert (lightning_trainer.precision, lightning_trainer.gradient_clip_val) == ("bf16-mixed", 0.3)
    assert (lightning_trainer.max_epochs, lightning_trainer.loggers) == (3, [])


def test_what_a_lightning_trainer_decides_becomes_arguments_on_the_way_back(tmp_path: Path) -> None:
    module = TransformersModule(VectorClassifier(), {"learning_rate": 0.5, "output_dir": str(tmp_path)})
    rows = Rows(vector_rows(8))
    datamodule = TrainerDataModule(rows, args={"per_device_train_batch_size": 2})
    keywords = {"max_epochs": 7, "accumulate_grad_batches": 3, "precision": "bf16-mixed", "gradient_clip_val": 0.25}
    args = Trainer.from_lightning(module, datamodule, pl.Trainer(**keywords, **QUIET)).args
    assert (args.learning_rate, args.per_device_train_batch_size, args.num_train_epochs) == (0.5, 2, 7)
    assert (args.gradient_accumulation_steps, args.bf16, args.fp16, args.max_grad_norm) == (3, True, False, 0.25)
    own = TrainingArguments(str(tmp_path), num_train_epochs=2, report_to="none")
    given = Trainer.from_lightning(module, None, pl.Trainer(**keywords, **QUIET), own, train_dataset=rows)
    assert (given.args, given.train_dataset) == (own, rows)


def test_after_it_has_gone_on_once_a_trainer_trains_from_the_beginning(tmp_path: Path) -> None:
    module, datamodule, lightning_trainer = trainer_of(tmp_path).to_lightning(callbacks=[StopsLightningAt(2)])
    lightning_trainer.fit(module, datamodule=datamodule)
    trainer = Trainer.from_lightning(module, datamodule, lightning_trainer)
    trainer.train()
    trainer.model.losses.clear()
    trainer.train()
    assert len(trainer.model.losses) == 18


# ---- Bad input -------------------------------------------------------------------------------------------------------


def test_methods_of_a_subclass_that_lightning_would_not_call_are_named(tmp_path: Path) -> None:
    class Doubles(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    with pytest.raises(NotImplementedError, match=r"Doubles overrides compute_loss, .* in TransformersModule"):
        quiet_trainer(tmp_path, kind=Doubles).to_lightning()


def test_hooks_of_a_module_that_a_trainer_would_not_call_are_named(tmp_path: Path) -> None:
    class Doubles(TransformersModule):
        def compute_loss(self, inputs: Any, num_items_in_window: Any = None) -> Any:
            value, outputs = super().compute_loss(inputs, num_items_in_window)
            return 2 * value, outputs

    class DoublesToo(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    module = Doubles(VectorClassifier(), {"output_dir": str(tmp_path), "report_to": "none"})
    with pytest.raises(NotImplementedError, match=r"Doubles overrides compute_loss \(a Trainer's compute_loss\)"):
        Trainer.from_lightning(module)
    assert isinstance(DoublesToo.from_lightning(module), DoublesToo)


def test_callbacks_that_stay_behind_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Watches(TrainerCallback):
        pass

    trainer = quiet_trainer(tmp_path, given={"callbacks": [Watches()]})
    with caplog.at_level(logging.WARNING):
        module, datamodule, lightning_trainer = trainer.to_lightning(callbacks=[StopsLightningAt(1)])
        Trainer.from_lightning(module, datamodule, lightning_trainer)
    told = [record.getMessage() for record in caplog.records if "stay behind" in record.getMessage()]
    assert len(told) == 2
    assert "callbacks of the Trainer stay behind" in told[0] and ": Watches." in told[0]
    assert "callbacks of the lightning.Trainer stay behind: StopsLightningAt." in told[1]


def test_other_modules_and_trainers_than_the_trained_ones_are_refused(tmp_path: Path) -> None:
    trainer = stopped(quiet_trainer(tmp_path), 1)
    module, datamodule, lightning_trainer = trainer.to_lightning()
    with pytest.raises(TypeError, match=r"takes a TransformersModule, .* make Trainer\(model=\.\.\.\)"):
        Trainer.from_lightning(pl.LightningModule())
    with pytest.raises(TypeError, match=r"takes a TrainerDataModule, .* train_dataset="):
        Trainer.from_lightning(module, pl.LightningDataModule())
    with pytest.raises(RuntimeError, match="has no model yet"):
        Trainer.from_lightning(TransformersModule(VectorClassifier))
    for keywords, complaint in {
        "precision": ({"precision": "64-true"}, "'64-true'.*is no precision of a Trainer"),
        "clipping": ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "clips single gradients"),
    }.values():
        with pytest.raises(ValueError, match=complaint):
            Trainer.from_lightning(module, datamodule, pl.Trainer(**keywords, **QUIET))
    lightning_trainer.fit(module, datamodule=datamodule)
    other = TransformersModule(VectorClassifier())
    with pytest.raises(ValueError, match="has trained another module"):
        Trainer.from_lightning(other, datamodule, lightning_trainer)


def test_to_lightning_is_refused_while_training_goes_on(tmp_path: Path) -> None:
    class Crosses(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.to_lightning()

    trainer = quiet_trainer(tmp_path, given={"callbacks": [Crosses()]})
    with pytest.raises(RuntimeError, match=r"Call it when train\(\) has returned"):
        trainer.train()
