"""Subclasses that do not call `Trainer.__init__`, compared with transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader

import littrainer
from littrainer import set_seed
from littrainer.callbacks.handler import CallbackHandler
from littrainer.compat.accelerator.facade import _log_once
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier

SIDES: tuple[Any, Any] = (transformers, littrainer)
ROWS = vector_rows(8)


def batch() -> dict[str, Any]:
    return littrainer.default_data_collator(ROWS[:4])


def loader() -> DataLoader[Any]:
    return DataLoader(Rows(ROWS), batch_size=4, collate_fn=littrainer.default_data_collator)


def list_files(trainer: transformers.Trainer | littrainer.Trainer, folder: str = "") -> list[str]:
    names = os.listdir(os.path.join(str(trainer.args.output_dir), folder))
    return sorted(name for name in names if not name.startswith("littrainer_"))


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "per_second" not in name and not name.endswith("time")}


# Method -> function that calls it and returns a value that both sides must share.
CALLS: dict[str, Callable[[Any], Any]] = {
    "get_train_dataloader": lambda t: [batch["x"].tolist() for batch in t.get_train_dataloader()],
    "get_eval_dataloader": lambda t: [batch["x"].tolist() for batch in t.get_eval_dataloader()],
    "get_test_dataloader": lambda t: [batch["x"].tolist() for batch in t.get_test_dataloader(Rows(ROWS))],
    "num_examples": lambda t: t.num_examples(loader()),
    "_get_train_sampler": lambda t: len(t._get_train_sampler()),
    "_get_eval_sampler": lambda t: list(t._get_eval_sampler(Rows(ROWS))),
    "create_optimizer_and_scheduler": lambda t: t.create_optimizer_and_scheduler(num_training_steps=2),
    "create_optimizer": lambda t: len(t.create_optimizer().param_groups),
    "create_scheduler": lambda t: t.create_scheduler(2).get_last_lr(),
    "_get_learning_rate": lambda t: t._get_learning_rate(),
    "training_step": lambda t: t.training_step(t.model, batch()).item(),
    "compute_loss": lambda t: t.compute_loss(t.model, batch()).item(),
    "_prepare_inputs": lambda t: list(t._prepare_inputs(batch())),
    "get_batch_samples": lambda t: len(t.get_batch_samples(iter([batch()]), 2, torch.device("cpu"))[0]),
    "set_initial_training_values": lambda t: tuple(t.set_initial_training_values(t.args, loader())),
    "get_total_train_batch_size": lambda t: t.get_total_train_batch_size(t.args),
    "_wrap_model": lambda t: t._wrap_model(t.model) is t.model,
    "_clip_grad_norm": lambda t: float(t._clip_grad_norm(t.model)),
    "evaluate": lambda t: numbers(t.evaluate()),
    "predict": lambda t: t.predict(Rows(ROWS)).predictions.tolist(),
    "evaluation_loop": lambda t: numbers(t.evaluation_loop(loader(), "Evaluation").metrics),
    "prediction_step": lambda t: [value.tolist() for value in t.prediction_step(t.model, batch(), False)],
    "_evaluate": lambda t: numbers(t._evaluate(None, None)),
    "_get_output_dir": lambda t: t._get_output_dir(None) == t.args.output_dir,
    "_save_checkpoint": lambda t: (t._save_checkpoint(t.model, None), list_files(t, "checkpoint-0")),
    "_save_optimizer_and_scheduler": lambda t: (t._save_optimizer_and_scheduler(t.args.output_dir), list_files(t)),
    "_save_rng_state": lambda t: (t._save_rng_state(t.args.output_dir), list_files(t)),
    "_save_scaler": lambda t: (t._save_scaler(t.args.output_dir), list_files(t)),
    "save_model": lambda t: (t.save_model(), list_files(t)),
    "_save": lambda t: (t._save(), list_files(t)),
    "save_state": lambda t: (t.save_state(), list_files(t)),
    "log": lambda t: (t.log({"a": 1.0}), t.state.log_history),
    "save_metrics": lambda t: (t.save_metrics("train", {"a": 1.0}), list_files(t)),
    "store_flos": lambda t: (t.store_flos(), t.state.total_flos),
    "floating_point_ops": lambda t: t.floating_point_ops(batch()),
    "create_model_card": lambda t: (t.create_model_card(), list_files(t)),
    "is_world_process_zero": lambda t: t.is_world_process_zero(),
    "add_callback": lambda t: t.add_callback(transformers.TrainerCallback),
    "_validate_args": lambda t: t._validate_args(),
    "_load_callback_state": lambda t: t._load_callback_state(),
    "train": lambda t: (t.train().training_loss, t.state.global_step),
}


def make_trainer(side: Any, folder: Path) -> Any:
    set_seed(3)
    args = side.TrainingArguments(
        str(folder), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, per_device_train_batch_size=4
    )
    trainer = side.Trainer(VectorClassifier(), args, train_dataset=Rows(ROWS), eval_dataset=Rows(ROWS))
    trainer.create_optimizer_and_scheduler(num_training_steps=2)
    trainer.current_gradient_accumulation_steps, trainer.model.config = 1, transformers.BertConfig()
    return trainer


def make_bare_trainer(side: Any, folder: Path, names: list[str]) -> Any:
    """Return a Trainer without `__init__` and with these attributes, the accelerator set first."""
    source, trainer = make_trainer(side, folder), side.Trainer.__new__(side.Trainer)
    for name in sorted(names, key=lambda name: (name != "accelerator", name)):
        value = Accelerator(cpu=True) if name == "accelerator" else getattr(source, name, None)
        if not isinstance(getattr(side.Trainer, name, None), property) or getattr(side.Trainer, name).fset:
            setattr(trainer, name, value)
    set_seed(5)
    return trainer


@pytest.mark.parametrize("method", CALLS)
def test_a_method_needs_no_more_attributes_than_in_transformers(method: str, tmp_path: Path) -> None:
    needed = ["args", "model"]
    while True:
        try:
            expected = CALLS[method](make_bare_trainer(transformers, tmp_path / str(len(needed)), needed))
            break
        except AttributeError as error:
            assert error.name not in needed
            needed.append(error.name)
    assert CALLS[method](make_bare_trainer(littrainer, tmp_path / "ours", needed)) == expected


def make_trainer_with_custom_loop(side: Any) -> type[Any]:
    handler = side.trainer_callback.CallbackHandler if side is transformers else CallbackHandler

    class CustomLoop(side.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, args: Any, policy: Any):
            self.accelerator = accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
            assert self.accelerator.device.type == "cpu"
            self.args, self.processing_class, self.data_collator = args, None, None
            self.model: Any = torch.nn.ModuleDict({"policy": policy})
            self.optimizer, self.lr_scheduler, self.optimizer_cls_and_kwargs = None, None, None
            self.create_optimizer_and_scheduler(num_training_steps=2)
            self.callback_handler = handler([], self.model, None, self.optimizer, self.lr_scheduler)
            self.control = side.TrainerControl()
            self.state = side.TrainerState(stateful_callbacks=[self.control])
            self.current_flos, self.hp_search_backend = 0, None
            self.is_deepspeed_enabled = self.is_fsdp_enabled = False
            batches = DataLoader(Rows(vector_rows(11)), batch_size=4, collate_fn=littrainer.default_data_collator)
            self.model, self.optimizer, self.batches = accelerator.prepare(self.model, self.optimizer, batches)

        def train(self) -> None:
            for index, rows in enumerate(self.batches):
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model["policy"](**rows)["loss"])
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.state.global_step = index + 1
            self.lr_scheduler.step()
            self.log({"done": 1.0})
            self._save_checkpoint(self.model, trial=None)

        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            model, self.model = self.model, self.model["policy"]
            super().save_model(output_dir, _internal_call)
            self.model = model

    return CustomLoop


def test_a_custom_loop_with_an_accelerator_in_float32_trains_and_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _log_once.cache_clear()
    results = []
    for side in SIDES:
        set_seed(3)
        args = side.TrainingArguments(
            str(tmp_path / side.__name__), bf16=True, use_cpu=True, report_to="none", learning_rate=0.1
        )
        trainer = make_trainer_with_custom_loop(side)(args, VectorClassifier())
        trainer.train()
        weights = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
        results.append((weights, list_files(trainer), list_files(trainer, "checkpoint-3"), trainer.state.log_history))
    theirs, ours = results
    assert ours == theirs
    assert [record for record in caplog.records if "bf16 of the arguments has no effect" in record.message]
