"""Trial steps with a Trainer that is restored afterwards."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.data.columns import explain_dropped_columns
from littrainer.data.limits import DEVELOPMENT_RUN, check_order_is_fixed, is_overfit_run
from littrainer.data.loaders import find_batch_size
from littrainer.data.resume.progress import get_generator_states, set_generator_states
from littrainer.data.resume.rng import get_rng_states, set_rng_states
from littrainer.lightning_adapter.run_lightning import fit
from littrainer.loop.checks import check_before_training
from littrainer.loop.model_preparation import prepare_model_for_training
from littrainer.loop.overrides import find_overrides
from littrainer.loop.plan import TrainingPlan
from littrainer.loop.run import TrainingRun
from littrainer.model.traversal import find_model_device
from littrainer.strategies.full_state import is_sharded

TRAINING_ONLY_KEYWORDS = ("callbacks", "logger", "max_time", "profiler", DEVELOPMENT_RUN)
# A trial logs nonfinite losses unchanged.
TRIAL_ARGUMENTS: dict[str, Any] = {
    "eval_on_start": False,
    "eval_at_end": False,
    "enable_jit_checkpoint": False,
    "logging_nan_inf_filter": False,
}
# Their hooks cannot be removed from the parameters.
OPTIMIZERS_IN_BACKWARD = ("layerwise", "lomo")
# Up to a number for each object, since data is no state.
CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque)
MAX_CONTAINERS = 10_000


def check_can_try(trainer: TrainerContext, method: str) -> None:
    if trainer.is_in_train or trainer.lightning_module is not None:
        raise RuntimeError(f"{method}() was called while this Trainer trains: call it before train(), or after it.")
    if trainer.model is None:
        raise RuntimeError(f"{method}() needs a model, and this Trainer has none until train() makes one.")
    has_shards = is_sharded(trainer.model) or trainer.get_tp_size() > 1
    causes = {"fsdp": trainer.is_fsdp_enabled, "deepspeed": trainer.is_deepspeed_enabled, "a strategy": has_shards}
    cause = next((name for name, is_used in causes.items() if is_used), None)
    if cause is not None:
        raise NotImplementedError(
            f"{method}() needs the whole model in each process, to restore it, and {cause} splits it: call it in a run "
            "of one process, or with DDP."
        )
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if any(part in optimizer for part in OPTIMIZERS_IN_BACKWARD):
        raise NotImplementedError(
            f"{method}() cannot undo the steps of optim={optimizer!r} in the backward pass: call it with another "
            "optimizer of the same kind."
        )
    check_before_training(trainer)


@contextlib.contextmanager
def restore_trainer_after(
    trainer: TrainerContext, callbacks: Iterable[Any] = (), with_model: bool = True
) -> Iterator[None]:
    """Restore the Trainer, and attributes of callbacks, after a block of trial steps.

    Trial steps run on no copy, since callbacks may refer to the Trainer. Without `with_model` model and optimizer are
    not restored.
    """
    model = trainer.model
    parts = [trainer, trainer.args, trainer.control, trainer.callback_handler, trainer.accelerator, *callbacks]
    with contextlib.ExitStack() as stack:
        stack.callback(set_rng_states, get_rng_states(gpu=trainer.args.device.type == "cuda"))
        if with_model:
            for part in (trainer.optimizer, trainer.lr_scheduler):
                if part is not None:
                    stack.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
            stack.enter_context(_restore_tensors(model))
            parts += [*(getattr(model, name, None) for name in ("config", "generation_config")), *model.modules()]
        for part in parts:
            if hasattr(part, "__dict__"):
                stack.enter_context(_restore_attributes(part))
        trainer.session = trainer.session.next()
        yield


def strip_to_bare_training(args: Any, keywords: dict[str, Any], **changed: Any) -> None:
    lightning = {name: value for name, value in (args.lightning or {}).items() if name not in TRAINING_ONLY_KEYWORDS}
    vars(args).update(TRIAL_ARGUMENTS | {"lightning": lightning} | changed)
    for name in TRAINING_ONLY_KEYWORDS:
        keywords.pop(name, None)


class _StepLimit(TrainerCallback):
    """A callback that ends a training, and checks the batch size of a script's loader."""

    def __init__(self, trainer: TrainerContext, steps: int, batch_size: int | None):
        self.trainer, self.steps, self.batch_size = trainer, steps, batch_size
        self._is_unchecked = batch_size is not None and bool(find_overrides(trainer, "get_train_dataloader"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_substep_end()
        control.should_training_stop = control.should_training_stop or state.global_step >= self.steps

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        # The last micro-batch may be smaller.
        size = find_batch_size(self.trainer.lightning_module.micro_batch.inputs) if self._is_unchecked else None
        self._is_unchecked = False
        if size not in (None, self.batch_size):
            raise ValueError(
                f"scale_batch_size asked for micro-batches of {self.batch_size} samples, and get_train_dataloader() "
                f"made some of {size}: let it read self._train_batch_size."
            )


def take_steps(
    trainer: TrainerContext,
    steps: int,
    accumulation: int,
    callback: TrainerCallback | None = None,
    batch_size: int | None = None,
) -> None:
    """Take optimizer steps on the training data, within `restore_trainer_after`.

    Parameters:
        callback: may end the training.
        batch_size: of a micro-batch, also in a script's loader.
    """
    changed = {"max_steps": steps, "gradient_accumulation_steps": accumulation}
    strip_to_bare_training(trainer.args, trainer.lightning_keywords, **changed)
    limit = _StepLimit(trainer, steps, batch_size)
    trainer.callback_handler.callbacks = [limit] if callback is None else [callback, limit]
    trainer.lightning_callbacks.clear()
    session = trainer.session
    session.train_batch_size = batch_size or session.train_batch_size
    session.is_in_train = True
    with explain_dropped_columns(trainer), trainer.session.update_guard, prepare_model_for_training(trainer):
        loader = trainer.get_train_dataloader()
        if is_overfit_run(trainer):
            check_order_is_fixed(loader)
        states = get_generator_states(loader)
        plan = TrainingPlan(*trainer.set_initial_training_values(trainer.args, loader))
        run = session.run = TrainingRun(trainer, loader, plan, None, None, None)
        run.prepare_state()
        try:
            fit(trainer, run)
            run.step.drain_flag_sync()
        finally:
            set_generator_states(loader, states)
    session.is_in_train = False


@contextlib.contextmanager
def _restore_attributes(part: Any) -> Iterator[None]:
    """Restore attributes, and containers among them at any depth."""
    containers: list[Any] = [vars(part)]
    contents: dict[int, tuple[Any, Any]] = {}
    for value in containers:
        if type(value) in CONTAINERS and id(value) not in contents and len(contents) < MAX_CONTAINERS:
            contents[id(value)] = value, copy.copy(value)
            containers += value.values() if isinstance(value, dict) else value
    try:
        yield
    finally:
        for value, content in contents.values():
            # Entries may have no truth value to compare.
            value.clear()
            value.extend(content) if isinstance(value, (list, deque)) else value.update(content)


@contextlib.contextmanager
def _restore_tensors(model: nn.Module) -> Iterator[None]:
    """Remove gradients in the block, then restore all tensors."""
    device = find_model_device(model)
    values = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in (*model.parameters(), *model.buffers())]
    gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        if device is not None and find_model_device(model) != device:
            model.to(device)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for parameter, gradient, requires_grad in gradients:
            parameter.requires_grad = requires_grad
            parameter.grad = gradient
