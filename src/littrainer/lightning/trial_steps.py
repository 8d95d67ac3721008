"""Optimizer steps that only find something out: the Trainer is afterwards what it was."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

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
# Optimizers whose steps are taken in the backward pass, each parameter's for itself, by hooks that stay with it.
STEPPING_IN_BACKWARD = ("layerwise", "lomo")
# What stood in attributes of these kinds is put back, and in so many of them within one object: a list of rows is no
# state.
CONTAINERS, MOST_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque), 10_000


def check_can_try(trainer: Any, method: str) -> None:
    """Refuse trial steps if what they change could not be put back.

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


@contextlib.contextmanager
def left_as_found(trainer: Any, callbacks: Iterable[Any] = (), with_model: bool = True) -> Iterator[None]:
    """While the block runs trial steps change the Trainer; afterwards it is as it was, however the block ends.

    That is its model with weights, gradients, modes and hooks, its optimizer and schedule, its arguments and callbacks,
    and the random generators.

    Parameters:
        callbacks: callbacks that hear of the steps, whose attributes are put back.
        with_model: False leaves model and optimizer as the steps leave them, and takes no copy of them.
    """
    model: Any = trainer.model
    parts = [trainer, trainer.args, trainer.control, trainer.callback_handler, trainer.accelerator, *callbacks]
    with contextlib.ExitStack() as found:
        found.callback(set_random_states, capture_random_states(gpu=trainer.args.device.type == "cuda"))
        if with_model:
            for part in (trainer.optimizer, trainer.lr_scheduler):
                if part is not None:
                    found.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
            found.callback(_putting_weights_back(model))
            parts += [*(getattr(model, name, None) for name in ("config", "generation_config")), *model.modules()]
        for one in parts:
            if hasattr(one, "__dict__"):
                found.enter_context(_attributes_kept(one))
        trainer.session = trainer.session.next()
        yield


def keep_steps_only(args: Any, keywords: dict[str, Any], **changed: Any) -> None:
    """Let nothing but steps happen in a training, and change further arguments; within `left_as_found`."""
    lightning = {name: value for name, value in (args.lightning or {}).items() if name not in OF_THE_TRAINING}
    vars(args).update(ARGUMENTS | {"lightning": lightning} | changed)
    for name in OF_THE_TRAINING:
        keywords.pop(name, None)


def take_steps(trainer: Any, steps: int, callback: TrainerCallback, accumulation: int) -> None:
    """Take optimizer steps on the training data, of which nobody but one callback hears; within `left_as_found`.

    Parameters:
        steps: optimizer steps; the data is repeated if it is too short for them.
        callback: called at the events of the training; it may end it.
        accumulation: micro-batches in an optimizer step.
    """
    keep_steps_only(trainer.args, trainer.lightning_keywords, max_steps=steps, gradient_accumulation_steps=accumulation)
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
    """Put back an object's attributes, and what stands in those that are plain containers, however deep."""
    found: list[Any] = [vars(one)]
    kept: dict[int, tuple[Any, Any]] = {}
    for value in found:
        if type(value) in CONTAINERS and id(value) not in kept and len(kept) < MOST_CONTAINERS:
            kept[id(value)] = value, copy.copy(value)
            found += value.values() if isinstance(value, dict) else value
    try:
        yield
    finally:
        for value, content in kept.values():
            # Not asked whether it has changed: what stands in it may have no truth value.
            value.clear()
            value.extend(content) if isinstance(value, (list, deque)) else value.update(content)


def _putting_weights_back(model: nn.Module) -> Callable[[], None]:
    """Take gradients away; return what puts them back, with weights and buffers, which wait in the host's memory."""
    device = model_device(model)
    values = [(one, one.detach().to("cpu", copy=True)) for one in (*model.parameters(), *model.buffers())]
    gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, *_ in gradients:
        parameter.grad = None

    @torch.no_grad()
    def put_back() -> None:
        if device is not None and model_device(model) != device:
            model.to(device)
        for tensor, value in values:
            tensor.copy_(value)
        for parameter, gradient, requires_grad in gradients:
            parameter.requires_grad = requires_grad
            parameter.grad = gradient

    return put_back
