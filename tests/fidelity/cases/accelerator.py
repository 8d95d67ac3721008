"""The accelerator and attributes as a subclass sees them, and objects that a script prepares with it."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import FEATURES, Rows, Stream, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import CLASSES, VectorClassifier

ACCELERATOR_VALUES = (
    "device num_processes process_index local_process_index is_main_process is_local_main_process is_last_process "
    "use_distributed distributed_type mixed_precision scaler sync_gradients step "
    "gradient_accumulation_steps optimizer_step_was_skipped deepspeed_plugin parallelism_config is_fsdp2 "
    "split_batches dispatch_batches even_batches use_seedable_sampler non_blocking step_scheduler_with_optimizer"
)
STATE_VALUES = (
    "device num_processes process_index local_process_index is_main_process is_local_main_process is_last_process "
    "distributed_type mixed_precision deepspeed_plugin parallelism_config use_distributed backend debug is_fsdp2 "
    "initialized"
)
GRADIENT_VALUES = (
    "sync_gradients end_of_dataloader remainder in_dataloader num_steps adjust_scheduler sync_with_dataloader "
    "plugin_kwargs"
)
LOADER_VALUES = "split_batches dispatch_batches even_batches use_seedable_sampler data_seed non_blocking"
TRAINER_VALUES = (
    "is_in_train is_deepspeed_enabled is_fsdp_enabled is_fsdp_xla_enabled is_model_parallel place_model_on_device "
    "model_accepts_loss_kwargs label_names can_return_loss hp_search_backend hp_name _train_batch_size "
    "_signature_columns _loss_shifts_labels label_smoother neftune_noise_alpha deepspeed hub_model_id "
    "optimizer_cls_and_kwargs current_flos _created_lr_scheduler _loggers_initialized is_fsdp_xla_v1_enabled "
    "is_fsdp_xla_v2_enabled processing_class is_distributed_loading_by_transformers model_init compute_loss_func "
    "preprocess_logits_for_metrics"
)
TRAINING_VALUES = (
    "current_gradient_accumulation_steps _globalstep_last_logged _initial_global_step "
    "_initial_num_input_tokens_seen _total_loss_scalar _tr_loss _trial"
)


def shown(value: Any) -> Any:
    """A value that both sides' records can hold; the columns have no order, and transformers repeats some."""
    if isinstance(value, list) and "label_ids" in value:
        return sorted(set(value))
    # accelerate numbers the CPU, which torch does not.
    if isinstance(value, torch.device):
        return value.type
    return str(value) if isinstance(value, str) else copy.deepcopy(value)


def values_of(owner: Any, names: str) -> dict[str, Any]:
    return {name: shown(getattr(owner, name)) for name in names.split()}


def view_of(trainer: Any) -> dict[str, Any]:
    """Return the attributes that a subclass can read now."""
    accelerator, state = trainer.accelerator, trainer.accelerator.state
    rows = torch.arange(5.0)
    return {
        "accelerator": values_of(accelerator, ACCELERATOR_VALUES),
        "state": values_of(state, STATE_VALUES),
        "loaders": values_of(accelerator.dataloader_config, LOADER_VALUES),
        "trainer": values_of(trainer, TRAINER_VALUES),
        "is wrapped": trainer.model_wrapped is not trainer.model,
        "optimizer": trainer.optimizer is not None and [group["lr"] for group in trainer.optimizer.param_groups],
        "schedule": trainer.lr_scheduler is not None and trainer.lr_scheduler.get_last_lr(),
        "handler": [
            type(trainer.callback_handler.optimizer).__name__ == "NoneType",
            trainer.callback_handler.model is trainer.model,
        ],
        "gathered": accelerator.gather(rows),
        "reduced": [accelerator.reduce({"a": rows}, how, 3.0) for how in ("sum", "mean", "max")],
        "padded": accelerator.pad_across_processes(rows),
        "unwrapped": accelerator.unwrap_model(trainer.model_wrapped) is trainer.model,
        "state dict": sorted(accelerator.get_state_dict(trainer.model_wrapped)),
    }


def view_in_a_step(trainer: Any) -> dict[str, Any]:
    """The same where a loader is being read, with what the accelerator knows of that loader."""
    accelerator = trainer.accelerator
    rows = torch.arange(5.0)
    return {
        **view_of(trainer),
        "in training": {name: shown(getattr(trainer, name, None)) for name in TRAINING_VALUES.split()},
        "gradients": values_of(accelerator.gradient_state, GRADIENT_VALUES),
        "for metrics": [
            accelerator.gather_for_metrics(rows),
            accelerator.gather_for_metrics({"rows": rows, "more": (rows, rows)}),
            accelerator.gather_for_metrics(torch.tensor(2.0)),
            trainer.gather_function(rows),
            accelerator.gather_for_metrics(["a", "b", "c", "d"]),
            accelerator.gather_for_metrics([rows, "b", "c", "d"], use_gather_object=True),
        ],
    }


@scenario(extra=True)
def accelerator_and_attributes_as_a_subclass_sees_them(side: Side) -> Record:
    Trainer: Any = side.Trainer
    records: list[Any] = []

    class Looking(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            records.append(("constructed", view_of(self)))

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            records.append(("compute_loss", view_in_a_step(self)))
            return super().compute_loss(model, inputs, *args, **kwargs)

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            records.append(("prediction_step", self.is_in_train and view_in_a_step(self)))
            return super().prediction_step(*args, **kwargs)

    TrainerCallback: Any = side.TrainerCallback

    class Listener(TrainerCallback):
        pass

    def note(event: str, look: Any) -> Any:
        def on_event(self: Any, *args: Any, **kwargs: Any) -> None:
            records.append((event, look(trainer)))

        return on_event

    for event in ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"):
        setattr(Listener, event, note(event, view_in_a_step))
    for event in ("on_train_begin", "on_evaluate", "on_train_end"):
        setattr(Listener, event, note(event, view_of))
    trainer = side.vector_trainer(
        rows=22,
        kind=Looking,
        compute_metrics=accuracy,
        callbacks=[Listener()],
        num_train_epochs=1,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        per_device_train_batch_size=4,
    )
    output = trainer.train()
    records.append(("trained", view_of(trainer)))
    return side.record(trainer, output, extra={"seen": records})


@scenario(extra=True)
def rows_gathered_in_training_over_a_stream(side: Side) -> Record:
    Trainer: Any = side.Trainer
    gathered: list[Any] = []

    class Gathering(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            gathered.append(self.accelerator.gather_for_metrics(inputs["labels"]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = side.vector_trainer(
        train_dataset=Stream(vector_rows(14)), kind=Gathering, max_steps=5, gradient_accumulation_steps=2
    )
    return side.train(trainer, extra={"gathered": gathered})


@scenario(extra=True)
def auxiliary_model_with_a_separate_optimizer(side: Side) -> Record:
    """A second model whose optimizer and schedule are prepared and step at each micro-batch, if they are let."""
    Trainer: Any = side.Trainer
    TrainerCallback: Any = side.TrainerCallback
    records: list[Any] = []

    class Auxiliary(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            auxiliary = torch.nn.Linear(FEATURES, CLASSES)
            optimizer = torch.optim.AdamW(auxiliary.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
            prepared = self.accelerator.prepare(schedule, auxiliary, "neither", optimizer)
            self.auxiliary_schedule, self.auxiliary, self.neither, self.auxiliary_optimizer = prepared
            self.accelerator.prepare_model(VectorClassifier(), evaluation_mode=True)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if not model.training:
                return loss
            return loss + torch.nn.functional.cross_entropy(self.auxiliary(inputs["x"]), inputs["labels"])

    class Stepping(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            trainer.auxiliary_optimizer.step()
            trainer.auxiliary_schedule.step()
            trainer.auxiliary_optimizer.zero_grad()
            inner = trainer.accelerator.unwrap_model(trainer.auxiliary)
            records.append([inner.weight.detach().clone(), trainer.auxiliary_schedule.get_last_lr()])

        on_pre_optimizer_step = on_substep_end

    trainer = side.vector_trainer(
        rows=10, kind=Auxiliary, callbacks=[Stepping()], num_train_epochs=2, gradient_accumulation_steps=2
    )
    optimizer = trainer.auxiliary_optimizer
    output = trainer.train()
    extra = {
        "seen": records,
        "neither": trainer.neither,
        "skipped": optimizer.step_was_skipped,
        "inside": type(optimizer.optimizer).__name__,
        "groups": [group["lr"] for group in optimizer.param_groups],
        "state": sorted(optimizer.state_dict()),
        "is torch's": isinstance(optimizer, torch.optim.Optimizer),
    }
    return side.record(trainer, output, extra=extra)


@scenario(extra=True)
def adversarial_steps_through_the_accelerator(side: Side) -> Record:
    """A training_step that calls backward twice, and accumulates, clips and leaves synchronisation out on its own."""
    Trainer: Any = side.Trainer
    norms: list[Any] = []

    class Adversarial(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            accelerator = self.accelerator
            with accelerator.accumulate(model), accelerator.no_sync(model), accelerator.autocast():
                again = self.compute_loss(model, {**inputs, "x": inputs["x"] + 0.1})
            norms.append([accelerator.sync_gradients, accelerator.step])
            accelerator.backward(again / 2)
            accelerator.gradient_accumulation_steps = 4
            accelerator.backward(model(**inputs)["loss"])
            accelerator.gradient_accumulation_steps = 1
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            accelerator.clip_grad_value_(model.parameters(), 0.05)
            return loss

    trainer = side.vector_trainer(rows=14, kind=Adversarial, num_train_epochs=1, gradient_accumulation_steps=2)
    return side.train(trainer, extra={"norms": norms})


@scenario(extra=True)
def accelerator_used_outside_of_training(side: Side) -> Record:
    """Loaders, shares, decorators, files and flags, as scripts use them around a Trainer."""
    trainer = side.vector_trainer(rows=8)
    accelerator = trainer.accelerator
    loader = accelerator.prepare_data_loader(DataLoader(Rows(vector_rows(7)), batch_size=2, collate_fn=len))
    ran: list[Any] = []
    for decorate in (
        accelerator.on_main_process,
        accelerator.on_local_main_process,
        accelerator.on_last_process,
        accelerator.on_process(process_index=3),
        accelerator.on_local_process(local_process_index=3),
    ):
        ran.append(decorate(lambda value: value + 1)(1))
    with accelerator.split_between_processes(["a", "b"], apply_padding=True) as share, accelerator.main_process_first():
        ran.append(share)
    with accelerator.local_main_process_first():
        accelerator.wait_for_everyone()
    accelerator.even_batches = False
    accelerator.dataloader_config.dispatch_batches = False
    memory = SimpleNamespace(model=trainer.model)
    memory.model = accelerator.free_memory(memory.model)
    leaf = torch.ones(2, requires_grad=True)
    accelerator.backward(leaf.sum() * 3)
    extra = {
        "batches": [list(loader), list(loader)],
        "ran": ran,
        "written": [
            accelerator.even_batches,
            accelerator.dataloader_config.dispatch_batches,
            accelerator.dispatch_batches,
        ],
        "freed": [memory.model, accelerator.clear()],
        "gradient": leaf.grad,
        "process": [
            trainer.args.distributed_state.num_processes,
            trainer.args._setup_devices.type,
            trainer.args._n_gpu,
        ],
        "default": trainer.args.default_optim,
    }
    return side.train(trainer, extra=extra)
