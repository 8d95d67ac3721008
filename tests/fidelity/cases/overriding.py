"""Subclasses whose overrides change what a Trainer does, as scripts and libraries write them."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import SequentialSampler

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import ORACLE, Side
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import CountingClassifier, VectorClassifier


def trainer_of(
    side: Side, kind: Any, model: Any = None, /, rows: int = 18, overrides: Any = None, **changes: Any
) -> Any:
    """A Trainer over vectors that takes optimizer steps of three micro-batches, two in the last one of an epoch."""
    keywords = {
        "train_dataset": Rows(vector_rows(rows)),
        "eval_dataset": Rows(vector_rows(7, seed=1)),
        **(overrides or {}),
    }
    torch.manual_seed(3)
    return kind(
        model=VectorClassifier() if model is None else model(),
        args=side.arguments(**{"gradient_accumulation_steps": 3, **changes}),
        callbacks=[side.watcher],
        **keywords,
    )


def run_in_turn(side: Side, kinds: list[Any], model: Any = None, **changes: Any) -> Record:
    """Train with one class after the other, then evaluate; the record is the last class's."""
    histories = []
    for number, kind in enumerate(kinds):
        trainer = trainer_of(side, kind, model, output_dir=f"out{number}", **changes)
        output = trainer.train()
        metrics = trainer.evaluate()
        histories.append(
            [[entry.get(key) for key in ("loss", "grad_norm", "eval_loss")] for entry in trainer.state.log_history]
        )
    return side.record(trainer, output, metrics, extra={"histories": histories})


def cross_entropy(model: Any, inputs: Any, **keywords: Any) -> Any:
    labels = inputs["labels"]
    outputs = model(x=inputs["x"])
    return nn.functional.cross_entropy(outputs["logits"], labels, **keywords), outputs


# ---- Losses -------------------------------------------------------------------------------------------------------


@scenario(extra=True)
def custom_losses_with_and_without_division(side: Side) -> Record:
    def use_custom_loss(is_scaled: bool | None) -> Any:
        class CustomLoss(side.Trainer):
            loss_is_scaled_for_ga = is_scaled

            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                if num_items_in_batch is None:
                    loss, outputs = cross_entropy(model, inputs)
                else:
                    loss, outputs = cross_entropy(model, inputs, reduction="sum")
                    loss = loss / num_items_in_batch
                return (loss, outputs) if return_outputs else loss

        return CustomLoss

    return run_in_turn(side, [use_custom_loss(scaled) for scaled in (None, True, False)], CountingClassifier)


@scenario(extra=True)
def custom_losses_in_earlier_spellings(side: Side) -> Record:
    is_oracle = side.name == ORACLE

    # transformers 5 raises at the spellings of its earlier releases; there the methods have today's signatures.
    class Earlier(side.Trainer):
        loss_is_scaled_for_ga = False

        def decayed(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            loss, outputs = side.names.Trainer.compute_loss(self, model, inputs, return_outputs=True)
            loss = loss + sum(weight.square().sum() for weight in model.parameters()) / 100
            return (loss, outputs) if return_outputs else loss

        if is_oracle:

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
                return self.decayed(model, inputs, return_outputs)

            def log(self, logs: Any, start_time: Any = None) -> None:
                super().log({**logs, "mark": 1})

            def _get_train_sampler(self, train_dataset: Any = None) -> Any:
                return SequentialSampler(self.train_dataset)

            def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
                return [next(epoch_iterator) for _ in range(num_batches)], None

        else:

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
                return self.decayed(model, inputs, return_outputs)

            def log(self, logs: Any) -> None:
                super().log({**logs, "mark": 1})

            def _get_train_sampler(self) -> Any:
                return SequentialSampler(self.train_dataset)

            def get_batch_samples(self, epoch_iterator: Any, num_batches: int) -> Any:
                return [next(epoch_iterator) for _ in range(num_batches)], None

    return run_in_turn(side, [Earlier])


@scenario(extra=True)
def methods_set_on_the_instance_and_on_the_class(side: Side) -> Record:
    Trainer = side.names.Trainer

    def doubled(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = Trainer.compute_loss(self, model, inputs, return_outputs=True, **kwargs)
        return (loss * 2, outputs) if return_outputs else loss * 2

    class OnInstance(side.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.compute_loss = types.MethodType(doubled, self)
            self.get_decay_parameter_names = lambda model: []

    trainer = trainer_of(side, OnInstance, weight_decay=0.1, eval_strategy="epoch")
    output = trainer.train()
    first = trainer.state.log_history
    originals = {name: vars(Trainer)[name] for name in ("training_step", "prediction_step")}

    def custom_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return originals["training_step"](self, model, inputs, num_items_in_batch) * 1

    def custom_prediction(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = originals["prediction_step"](self, *args, **kwargs)
        return loss + 1, logits, labels

    Trainer.training_step, Trainer.prediction_step = custom_step, custom_prediction
    try:
        trainer = trainer_of(side, side.Trainer, output_dir="patched")
        patched = trainer.train()
        metrics = trainer.evaluate()
    finally:
        for name, method in originals.items():
            setattr(Trainer, name, method)
    losses = [entry.get("loss", entry.get("eval_loss")) for entry in first]
    return side.record(trainer, output, patched, metrics, extra={"losses": losses})


# ---- Training steps -----------------------------------------------------------------------------------------------


@scenario(extra=True)
def custom_training_steps_with_several_backward_passes(side: Side) -> Record:
    records: list[Any] = []

    class FastGradientMethod(side.Trainer):
        """Adds the gradient of a second pass over perturbed weights."""

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
            records.append((self.current_gradient_accumulation_steps, self.accelerator.sync_gradients))
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            loss = loss / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            weight = model.inner.weight
            backup = weight.data.clone()
            weight.data.add_(weight.grad / (weight.grad.norm() + 1e-12), alpha=0.1)
            self.accelerator.backward(self.compute_loss(model, inputs) / self.current_gradient_accumulation_steps)
            weight.data = backup
            return loss.detach()

    class ProjectedGradient(FastGradientMethod):
        """Calls its parent, then runs three more backward passes."""

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            inputs = self._prepare_inputs(inputs)
            noise = torch.zeros_like(inputs["x"])
            for _ in range(3):
                noise.requires_grad_(True)
                value = self.compute_loss(model, {**inputs, "x": inputs["x"] + noise})
                self.accelerator.backward(value / 10)
                noise = (noise + 0.1 * noise.grad.sign()).detach()
            return loss

    class WithoutNumber(side.Trainer):
        # transformers 5 hands the third argument over.
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            return super().training_step(model, inputs) + 1

    record = run_in_turn(side, [FastGradientMethod, ProjectedGradient, WithoutNumber])
    record.extra["seen"] = records
    return record


# ---- Optimizers ---------------------------------------------------------------------------------------------------


class LossWithParameters(nn.Module):
    """A loss function with weights outside of the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.scale = nn.Linear(3, 3)

    def forward(self, inputs: Any) -> Any:
        return nn.functional.cross_entropy(self.scale(self.model(x=inputs["x"])["logits"]), inputs["labels"])


@scenario(extra=True)
def custom_optimizers_over_other_parameters(side: Side) -> Record:
    def replace_groups(key: str, groups: Callable[[Any], Any]) -> Any:
        class WithLossParameters(side.Trainer):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.loss = LossWithParameters(self.model).to(self.args.device)

            def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
                optimizer_class, keywords = super().get_optimizer_cls_and_kwargs(args, model)
                return optimizer_class, {**keywords, key: groups(self.loss)}

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
                loss = self.loss(inputs)
                return (loss, {}) if return_outputs else loss

        return WithLossParameters

    class Assembled(side.Trainer):
        def create_optimizer(self) -> Any:
            self.optimizer = torch.optim.SGD(
                [
                    {"params": [parameter], "lr": 0.1 / (number + 1)}
                    for number, parameter in enumerate(self.model.parameters())
                ]
            )
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, num_training_steps)
            return self.lr_scheduler

    def list_all(loss: Any) -> Any:
        return [{"params": list(loss.parameters()), "weight_decay": 0.1}]

    return run_in_turn(
        side,
        [
            replace_groups("optimizer_dict", list_all),
            replace_groups("params", lambda loss: list(loss.parameters())),
            replace_groups("model", list_all),
            Assembled,
        ],
    )


# ---- Saving and loading -------------------------------------------------------------------------------------------


@scenario(extra=True)
def further_files_in_checkpoints(side: Side) -> Record:
    called: list[Any] = []

    class FurtherFiles(side.Trainer):
        def _get_output_dir(self, trial: Any) -> str:
            return f"{self.args.output_dir}/trial"

        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            called.append("_save")
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            save_file(self.model.state_dict() if state_dict is None else state_dict, f"{output_dir}/own.safetensors")

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            called.append(("_save_checkpoint", model is self.model))
            super()._save_checkpoint(model, trial)
            Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}", "card.md").write_text("card")

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            super()._save_optimizer_and_scheduler(output_dir)
            Path(output_dir, "beside_the_optimizer.txt").write_text("here")

        def _save_rng_state(self, output_dir: str) -> None:
            torch.save(torch.get_rng_state(), f"{output_dir}/own_generator.pt")

        def _load_from_checkpoint(self, checkpoint_path: str) -> None:
            called.append(("_load_from_checkpoint", checkpoint_path))
            self.model.load_state_dict(load_file(f"{checkpoint_path}/own.safetensors"))

        def _load_rng_state(self, checkpoint: Any) -> None:
            called.append(("_load_rng_state", checkpoint))
            torch.set_rng_state(torch.load(f"{checkpoint}/own_generator.pt"))

        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            called.append(Path(checkpoint, "beside_the_optimizer.txt").read_text())

        def _load_best_model(self) -> None:
            called.append(("_load_best_model", self.state.best_model_checkpoint))
            self._load_from_checkpoint(self.state.best_model_checkpoint)

    saving = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
    }
    trainer_of(side, FurtherFiles, **{**saving, "max_steps": 2}).train()
    trainer = trainer_of(side, FurtherFiles, **saving)
    output = trainer.train(resume_from_checkpoint="out/trial/checkpoint-2")
    return side.record(trainer, output, extra={"called": called})


# ---- The loop -----------------------------------------------------------------------------------------------------


@scenario(saves=True, extra=True)
def overridden_logging_without_the_parents(side: Side) -> Record:
    class CustomLogging(side.Trainer):
        """Logs further figures, as TRL's online DPO does."""

        def _maybe_log_save_evaluate(
            self,
            tr_loss: Any,
            grad_norm: Any,
            model: Any,
            trial: Any,
            epoch: Any,
            ignore_keys_for_eval: Any,
            start_time: Any,
            learning_rate: Any = None,
        ) -> None:
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                summed = tr_loss.mean().item()
                tr_loss -= tr_loss
                steps = self.state.global_step - self._globalstep_last_logged
                logs = {"loss": round(summed / steps, 4), "grad_norm": grad_norm.item(), "own": float(epoch)}
                logs["learning_rate"] = self._get_learning_rate() if learning_rate is None else learning_rate
                self._total_loss_scalar += summed
                self._globalstep_last_logged = self.state.global_step
                self.store_flos()
                self.log(logs, start_time)
            if self.control.should_evaluate:
                metrics = self._evaluate(trial, ignore_keys_for_eval)
                is_new_best = self._determine_best_metric(metrics=metrics, trial=trial)
                if self.args.save_strategy == "best":
                    self.control.should_save = is_new_best
            if self.control.should_save:
                self._save_checkpoint(model, trial)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    trainer = trainer_of(
        side,
        CustomLogging,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        metric_for_best_model="loss",
        num_train_epochs=3,
    )
    return side.record(trainer, trainer.train(), extra={"total": trainer._total_loss_scalar})


@scenario(saves=True, extra=True)
def overridden_inner_training_loop(side: Side) -> Record:
    called: list[Any] = []

    class Halving(nn.Module):
        """Wraps a model as data parallelism does."""

        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, **inputs: Any) -> Any:
            outputs = self.module(**inputs)
            return {**outputs, "loss": outputs["loss"] / 2}

    class Framed(side.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            called.append(("accelerator", self.accelerator.num_processes, self.model is None, self.is_fsdp_enabled))

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            called.append(("begins", kwargs["resume_from_checkpoint"], self.is_in_train))
            try:
                return super()._inner_training_loop(*args, **kwargs)
            finally:
                called.append(("ends", self.state.global_step))

        def _init_training_state(self, *args: Any) -> Any:
            done = super()._init_training_state(*args)
            called.append(("state", done, self.state.max_steps))
            return done

        def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
            output = super()._finalize_training(trial, num_train_samples, start_time)
            return output._replace(metrics={**output.metrics, "num_train_samples": num_train_samples})

        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            called.append(("wraps", type(model).__name__, training, self.optimizer is None))
            return Halving(model) if training and not isinstance(model, Halving) else model

        def call_model_init(self, trial: Any = None) -> Any:
            model = super().call_model_init(trial)
            model.marked = True
            return model

        def _move_model_to_device(self, model: Any, device: Any) -> None:
            called.append(("moves", device))
            super()._move_model_to_device(model, device)

        def store_flos(self) -> None:
            super().store_flos()
            self.state.total_flos += 1

        def floating_point_ops(self, inputs: Any) -> int:
            return 7

    trainer = trainer_of(
        side,
        lambda model, **overrides: Framed(model_init=lambda: VectorClassifier(), **overrides),
        eval_strategy="epoch",
        save_strategy="epoch",
    )
    first = trainer.train()
    again = trainer.train(resume_from_checkpoint="out/checkpoint-2")
    called.append((type(trainer.model_wrapped).__name__, trainer.model.marked))
    return side.record(trainer, first, again, extra={"called": called})


class Output(NamedTuple):
    """Return what a training returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


@scenario()
def overridden_training_loop(side: Side) -> Record:
    class CustomLoop(side.Trainer):
        def _inner_training_loop(
            self,
            batch_size: Any = None,
            args: Any = None,
            resume_from_checkpoint: Any = None,
            trial: Any = None,
            ignore_keys_for_eval: Any = None,
        ) -> Any:
            self.current_gradient_accumulation_steps = 1
            self.create_optimizer_and_scheduler(num_training_steps=5)
            model, self.optimizer = self.model, self.accelerator.prepare(self.optimizer)
            self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
            losses = []
            for inputs in self.get_train_dataloader():
                losses.append(self.training_step(model, inputs))
                norm = self.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                self.optimizer.step()
                self.lr_scheduler.step()
                model.zero_grad()
                self.state.global_step += 1
                self.log({"loss": losses[-1].item(), "grad_norm": norm.item(), "lr": self._get_learning_rate()})
            metrics = self.evaluate()
            return Output(self.state.global_step, float(sum(losses)), metrics)

    trainer = trainer_of(side, CustomLoop, gradient_accumulation_steps=1)
    return side.record(trainer, trainer.train())
