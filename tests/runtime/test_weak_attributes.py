"""A Trainer is freed without the garbage collector, since its parts refer to it weakly."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, TQDMProgressBar

from littrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback
from littrainer.strategies.model_wrapping import autocast_forward
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

SAVING = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


class Failing(TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken off")

    on_prediction_step = on_step_end


def trained(folder: Path, times: int = 1, resumes: bool = False, evaluates: bool = False, **changes: Any) -> Any:
    trainer = quiet_trainer(folder, **{"max_steps": 2, **changes})
    for _ in range(times):
        trainer.train()
    if resumes:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    if evaluates:
        trainer.evaluate()
        trainer.predict(trainer.eval_dataset)
    return trainer


def failed(folder: Path, method: str) -> Any:
    trainer = quiet_trainer(folder, trainer_kwargs={"callbacks": [Failing()]}, max_steps=2)
    with pytest.raises(RuntimeError, match="broken off"):
        getattr(trainer, method)()
    return trainer


def trained_adapters(folder: Path) -> Any:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(VectorClassifier(), peft.LoraConfig(target_modules=["inner", "head"]))
    return trained(folder, model=model, label_names=["labels"], resumes=True, **SAVING)


def trained_seq2seq(folder: Path) -> Any:
    args = Seq2SeqTrainingArguments(str(folder), max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
    rows = Rows(vector_rows(8))
    trainer = Seq2SeqTrainer(VectorClassifier(), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    return trainer


def searched(folder: Path) -> Any:
    rows = Rows(vector_rows(8))
    args = quiet_arguments(folder, max_steps=1, eval_strategy="epoch")
    trainer = Trainer(None, args, train_dataset=rows, eval_dataset=rows, model_init=lambda: VectorClassifier())
    trainer.hyperparameter_search(
        n_trials=2,
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 0.1, 0.2)},
        compute_objective=lambda metrics: metrics["eval_loss"],
    )
    trainer.train()
    return trainer


@pytest.fixture
def _collects_nothing() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


TRAININGS: dict[str, Callable[[Path], Any]] = {
    "a training": trained,
    "an evaluation alone": lambda folder: trained(folder, times=0, evaluates=True),
    "evaluations, saves, the best model and a resume": lambda folder: trained(
        folder, resumes=True, load_best_model_at_end=True, **SAVING
    ),
    "an error in training": lambda folder: failed(folder, "train"),
    "an error in an evaluation": lambda folder: failed(folder, "evaluate"),
    "ema_decay": lambda folder: trained(folder, ema_decay=0.5, **SAVING),
    "Lightning callbacks": lambda folder: trained(
        folder, trainer_kwargs={"callbacks": [EMAWeightAveraging(), TQDMProgressBar()]}, evaluates=True, **SAVING
    ),
    "log_speed, hang_timeout and auto_micro_batch": lambda folder: trained(
        folder, log_speed=True, hang_timeout=100.0, auto_micro_batch=True, on_nonfinite="rollback", **SAVING
    ),
    "Seq2SeqTrainer": trained_seq2seq,
    "adapters": trained_adapters,
    "a search": searched,
    "bf16, a resume": lambda folder: trained(folder, bf16=True, resumes=True, load_best_model_at_end=True, **SAVING),
}


@pytest.mark.usefixtures("_collects_nothing")
@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_a_trainer_without_references_is_freed_at_once_with_its_parts(
    tmp_path: Path, training: Callable[[Path], Any]
) -> None:
    trainer = training(tmp_path)
    objects: list[Any] = [trainer, trainer.model, *trainer.model.parameters()]
    parts = (trainer.optimizer, trainer.training_run, trainer.lightning_trainer)
    objects += [part for part in parts if part is not None]
    states = [] if trainer.optimizer is None else trainer.optimizer.state.values()
    objects += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    references = [weakref.ref(part) for part in objects]
    del trainer, objects, parts, states
    assert [type(reference()).__name__ for reference in references if reference() is not None] == []


@pytest.mark.usefixtures("_collects_nothing")
def test_the_lightning_trainer_can_be_used_without_its_trainer(tmp_path: Path) -> None:
    lightning = trained(tmp_path, trainer_kwargs={"callbacks": [EMAWeightAveraging()]}).lightning_trainer
    assert lightning.global_step == 2 and lightning.fit_loop.trainer.callbacks is lightning.callbacks
    assert any(isinstance(callback, EMAWeightAveraging) for callback in lightning.callbacks)


@pytest.mark.usefixtures("_collects_nothing")
def test_parts_of_a_deleted_trainer_can_be_used(tmp_path: Path) -> None:
    class TrainerHolder(Callback):
        def setup(self, trainer: lightning.pytorch.Trainer, pl_module: Any, stage: str) -> None:
            self.trainer = trainer

    holder = TrainerHolder()
    trainer = trained(tmp_path, trainer_kwargs={"callbacks": [holder]})
    accelerator, gradient_state = trainer.accelerator, pickle.loads(pickle.dumps(trainer.accelerator.gradient_state))
    del trainer
    assert holder.trainer.global_step == holder.trainer.fit_loop.trainer.global_step == 2
    assert pickle.loads(pickle.dumps(accelerator)).gradient_state.sync_gradients
    assert gradient_state.sync_gradients and not gradient_state.in_dataloader


def test_the_parts_of_a_lightning_trainer_and_of_its_copy_refer_to_it(tmp_path: Path) -> None:
    trainer = trained(tmp_path, times=2)
    copied = copy.deepcopy(trainer.lightning_trainer)
    assert trainer.lightning_trainer.fit_loop.trainer is trainer.lightning_trainer
    assert copied.fit_loop.trainer is copied and copied.global_step == 2


def test_the_error_of_a_deleted_models_method_has_advice() -> None:
    model = VectorClassifier()
    autocast_forward(model, "cpu", torch.bfloat16)
    forward = model.forward
    del model
    with pytest.raises(ReferenceError, match="forward is a method of a model that is gone"):
        forward(torch.ones(1, 8))


def test_a_copied_trainer_works_without_the_original(tmp_path: Path) -> None:
    trainer = trained(tmp_path, times=0, evaluates=True)
    expected, copied = trainer.evaluate()["eval_loss"], copy.deepcopy(trainer)
    del trainer
    assert copied.evaluate()["eval_loss"] == expected and copied.train().global_step == 2
