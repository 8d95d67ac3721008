"""Optimizer steps that only find something out: the Trainer is afterwards what it was."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from littrainer.checkpoint.random_state import capture_random_states, set_random_states
from littrainer.data.columns import naming_dropped_columns
from littrainer.data.limits import DEVELOPMENT_RUN, check_order_stays, overfits
from littrainer.data.position import generator_states, set_generator_states
from littrainer.engine.run_lightning import fit
from littrainer.model.traversal import model_device
from littrainer.strategies.shards import is_sharded
from littrainer.training.checks import check_before_training
from littrainer.training.model_preparation import model_prepared_for_training
from littrainer.training.plan import TrainingPlan
from littrainer.training.run import TrainingRun

if TYPE_CHECKING:
    from littrainer.callbacks.base import TrainerCallback

# Keywords for `lightning.Trainer` that are about the training itself, whose results trial steps must not be among.
OF_THE_TRAINING = ("callbacks", "logger", "max_time", "profiler", DEVELOPMENT_RUN)
# What the arguments say for the length of the trial: nothing but steps happens, and a loss that is no number is seen.
ARGUMENTS: dict[str, Any] = {"eval_on_start": False, "enable_jit_checkpoint": False, "logging_nan_inf_filter": False}
# What a model that recomputes activations calls it, by the newer name and the older one.
RECOMPUTING = ("activation_checkpointing", "gradient_checkpointing")
# Optimizers whose steps are taken in the backward pass, each parameter's for itself, by hooks that stay with it.
STEPPING_IN_BACKWARD = ("layerwise", "lomo")
# Where torch keeps what is called around a module's forward pass, and where transformers keeps the way to take it off.
HOOKS = tuple(
    f"_forward_{kind}{about}" for kind in ("hooks", "pre_hooks") for about in ("", "_with_kwargs", "_always_called")
)
HOOK_HANDLES = ("_require_grads_hook", "_require_grads_hooks")


def check_can_try(trainer: Any, method: str) -> None:
    """Refuse trial steps where what they change could not be put back.

    Parameters:
        method: the Trainer's method that asks, for the error.

    Raises:
        RuntimeError: a training goes on, or the Trainer has no model.
        NotImplementedError: the model is split between processes, or steps in its backward pass.
        ValueError: a training would be refused as well, before it began.
    """
    if trainer.is_in_train or trainer.lightning_module is not None:
        raise RuntimeError(f"{method}() was called while this Trainer trains: call it before train(), or after it.")
    if trainer.model is None:
        raise RuntimeError(f"{method}() needs a model, and this Trainer has none until train() makes one.")
    splits = {"fsdp": trainer.is_fsdp_enabled, "deepspeed": trainer.is_deepspeed_enabled, "a strategy": False}
    splits["a strategy"] = is_sharded(trainer.model) or trainer.get_tp_size() > 1
    found = [name for name, does in splits.items() if does]
    if found:
        raise NotImplementedError(
            f"{method}() needs the whole model in each process, to put it back as it was, and {found[0]} splits it: "
            "call it in a run of one process, or with DDP."
        )
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if any(part in name for part in STEPPING_IN_BACKWARD):
        raise NotImplementedError(
            f"{method}() cannot take back the steps of optim={name!r}, which are taken in the backward pass: try it "
            "with another optimizer of the same kind."
        )
    check_before_training(trainer)


def is_number(value: Any) -> bool:
    """Whether a parameter can be compared with numbers; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextlib.contextmanager
def left_as_found(trainer: Any) -> Iterator[None]:
    """While the block runs trial steps change the Trainer; afterwards it is as it was, however the block ends.

    That is its model with weights, gradients and modes, its optimizer and schedule, its arguments and callbacks, and
    the random generators.
    """
    has_gpu = trainer.args.device.type == "cuda"
    generators = capture_random_states(gpu=has_gpu)
    with contextlib.ExitStack() as found:
        found.callback(set_random_states, generators)
        parts = (trainer.args, trainer.control, trainer.callback_handler, trainer.accelerator)
        for one in (trainer, *parts):
            found.enter_context(_attributes_kept(one))
        trainer.session = trainer.session.next()
        for part in (trainer.optimizer, trainer.lr_scheduler):
            found.enter_context(_stepping_on_copies(part))
        found.enter_context(_model_kept(trainer.model))
        yield


def take_steps(trainer: Any, steps: int, callback: TrainerCallback, accumulation: int) -> None:
    """Take optimizer steps on the training data, of which nobody but one callback hears; within `left_as_found`.

    Parameters:
        steps: optimizer steps; the data is repeated where it is too short for them.
        callback: called at the events of the training; it may end it.
        accumulation: micro-batches in an optimizer step, whatever a schedule says.
    """
    given: Any = trainer.args.lightning
    vars(trainer.args).update(ARGUMENTS, max_steps=steps, gradient_accumulation_steps=accumulation)
    trainer.args.lightning = {name: value for name, value in (given or {}).items() if name not in OF_THE_TRAINING}
    for name in OF_THE_TRAINING:
        trainer.lightning_keywords.pop(name, None)
    trainer.callback_handler.callbacks = [callback]
    trainer.lightning_callbacks.clear()
    session = trainer.session
    session.is_in_train = True
    with naming_dropped_columns(trainer), trainer.update_guard, model_prepared_for_training(trainer):
        loader = trainer.get_train_dataloader()
        if overfits(trainer):
            check_order_stays(loader)
        own_generators = generator_states(loader)
        plan = TrainingPlan(*trainer.set_initial_training_values(trainer.args, loader))
        run = session.run = TrainingRun(trainer, loader, plan, None, None, None)
        run.prepare_state()
        try:
            fit(trainer, run)
            run.step.end_agreements()
        finally:
            set_generator_states(loader, own_generators)
    session.is_in_train = False


@contextlib.contextmanager
def _attributes_kept(one: Any) -> Iterator[None]:
    """Put back an object's attributes, and what stands in those that are plain lists, sets and dicts."""
    values = vars(one)
    kept = {name: (value, copy.copy(value) if _is_plain(value) else None) for name, value in values.items()}
    try:
        yield
    finally:
        values.clear()
        for name, (value, content) in kept.items():
            if content is not None:
                # Not asked whether it has changed: what stands in it may have no truth value.
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)
            values[name] = value


def _is_plain(value: Any) -> bool:
    return type(value) in (dict, list, set)


@contextlib.contextmanager
def _stepping_on_copies(part: Any) -> Iterator[None]:
    """Let an optimizer or a schedule, if there is one, step with copies of its states in the place of its own."""
    with contextlib.ExitStack() as found:
        if part is not None:
            found.enter_context(_attributes_kept(part))
            for inner in _parts_within(part):
                found.enter_context(_stepping_on_copies(inner))
        if isinstance(part, Optimizer):
            for group in part.param_groups:
                found.enter_context(_attributes_of_group_kept(group))
            parameters = {id(one): one for group in part.param_groups for one in group["params"]}
            part.state = copy.deepcopy(part.state, parameters)
        yield


def _parts_within(part: Any) -> list[Any]:
    """The optimizer inside a two-step optimizer, as SAM has one; the schedules inside one that is made of several."""
    kind = LRScheduler if isinstance(part, LRScheduler) else Optimizer
    held = [value if isinstance(value, (list, tuple)) else [value] for value in vars(part).values()]
    return [one for several in held for one in several if isinstance(one, kind)]


@contextlib.contextmanager
def _attributes_of_group_kept(group: dict[str, Any]) -> Iterator[None]:
    kept = dict(group)
    group.update({name: value.clone() for name, value in kept.items() if isinstance(value, torch.Tensor)})
    try:
        yield
    finally:
        group.clear()
        group.update(kept)


@contextlib.contextmanager
def _model_kept(model: nn.Module) -> Iterator[None]:
    """Put back a model's weights and buffers, which wait in the host's memory, its gradients, hooks and settings."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    # A forward pass may put another tensor in the place of a buffer, and so does moving the model.
    registered: list[tuple[Any, Any]] = []
    for module in model.modules():
        own = vars(module)
        among = ("_buffers", "_non_persistent_buffers_set", *HOOKS)
        registered += [(own[name], copy.copy(own[name])) for name in among if own.get(name) is not None]
    handles = [(module, {name: getattr(module, name, None) for name in HOOK_HANDLES}) for module in model.modules()]
    gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    settings = [getattr(model, name, None) for name in ("config", "generation_config")]
    name = next((one for one in RECOMPUTING if hasattr(model, f"{one}_disable")), None)
    recomputes = name is None or getattr(model, f"is_{name}", True)
    device = model_device(model)
    for parameter, *_ in gradients:
        parameter.grad = None
    try:
        with contextlib.ExitStack() as found:
            for one in settings:
                if hasattr(one, "__dict__"):
                    found.enter_context(_attributes_kept(one))
            yield
    finally:
        if device is not None and model_device(model) != device:
            model.to(device)
        if not recomputes and getattr(model, f"is_{name}"):
            getattr(model, f"{name}_disable")()
        for content, as_it_was in registered:
            content.clear()
            content.update(as_it_was)
        for module, as_they_were in handles:
            _put_back_handles(module, as_they_were)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient, requires_grad in gradients:
            parameter.requires_grad = requires_grad
            parameter.grad = gradient
        for module, was_training in modes:
            module.training = was_training


def _put_back_handles(module: nn.Module, as_they_were: dict[str, Any]) -> None:
    for name, value in as_they_were.items():
        if value is not None:
            setattr(module, name, value)
        elif name in vars(module):
            delattr(module, name)
