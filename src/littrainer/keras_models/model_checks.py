"""Which models, optimizers and settings a `TFTrainer` refuses, each with the reason and what to do instead."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from littrainer.arguments.training_arguments import TrainingArguments

# First part of the name of a base class's module -> what such a model computes with.
OTHER_FRAMEWORKS = {
    "tensorflow": "TensorFlow",
    "tf_keras": "TensorFlow",
    "jax": "JAX",
    "flax": "JAX",
}
ON_TORCH = (
    "Set the environment variable KERAS_BACKEND=torch before keras is imported, as in "
    "`KERAS_BACKEND=torch littrainer run script.py`, and make the model with keras 3"
)


def check_model(model: Any) -> None:
    """Refuse what is no Keras 3 model on the torch backend.

    Raises:
        NotImplementedError: a model of TensorFlow, of JAX, or of Keras on another backend than torch.
        TypeError: anything else that is no Keras model.
    """
    name = type(model).__name__
    for base in type(model).__mro__:
        framework = OTHER_FRAMEWORKS.get(base.__module__.partition(".")[0])
        if framework is not None:
            raise NotImplementedError(
                f"{name} is a model of {framework}, which littrainer does not train: its engine is torch. {ON_TORCH}."
            )
    # A model of Keras cannot be here without it.
    keras: Any = sys.modules.get("keras")
    if keras is None or not isinstance(model, keras.Model):
        advice = "Pass it to Trainer" if isinstance(model, nn.Module) else f"Pass a keras.Model. {ON_TORCH}"
        raise TypeError(f"TFTrainer takes a Keras model, and model is a {name}. {advice}.")
    backend = keras.config.backend() if hasattr(keras, "config") else "tensorflow"
    if backend != "torch":
        raise NotImplementedError(
            f"{name} is a Keras model on the backend {backend!r}, and littrainer trains on torch. {ON_TORCH}."
        )


def check_training_of(model: Any) -> None:
    """Refuse a model that would be trained otherwise than it says, unless run_model is overridden.

    Raises:
        NotImplementedError: it has a train_step of its own, or its losses are added up.
    """
    import keras

    if type(model).train_step is not keras.Model.train_step:
        raise NotImplementedError(
            f"{type(model).__name__} has a train_step of its own, which a TFTrainer does not call, since it steps the "
            "optimizer itself. Override run_model to return the loss and logits that it computes."
        )
    losses = keras.tree.flatten(getattr(model, "loss", None))
    if any(getattr(loss, "reduction", None) == "sum" for loss in losses):
        raise NotImplementedError(
            f"{type(model).__name__} was compiled with a loss of reduction='sum', and a TFTrainer trains on the mean "
            "over all micro-batches of an optimizer step. Leave the reduction out, and raise the learning rate instead."
        )


def check_arguments(args: Any) -> None:
    """Refuse arguments that mean nothing to a `TFTrainer`.

    Raises:
        TypeError: they are no TrainingArguments.
        NotImplementedError: they ask for what a Keras model cannot do here.
    """
    if not isinstance(args, TrainingArguments):
        raise TypeError(
            f"TFTrainer takes TFTrainingArguments as args, and they are a {type(args).__name__}: "
            'TFTrainer(model, TFTrainingArguments("folder"), ...).'
        )
    if args.label_smoothing_factor:
        raise NotImplementedError(
            f"label_smoothing_factor={args.label_smoothing_factor}: the loss of a TFTrainer is the model's own. "
            "Compile the model with keras.losses.CategoricalCrossentropy(label_smoothing=...), or override run_model."
        )
    if args.torch_compile:
        raise NotImplementedError(
            "torch_compile=True: torch.compile traces Keras's own Python in many small pieces, which takes minutes for "
            "a model of two layers. Leave it out."
        )
    splits = [name for name in ("fsdp", "deepspeed") if getattr(args, name)]
    if splits:
        raise NotImplementedError(
            f"{' and '.join(splits)}: a Keras model holds each variable whole. Leave it out; several processes train "
            "such a model each with a copy of it."
        )


def check_optimizers(optimizers: Any) -> None:
    """Refuse an optimizer and a schedule that are not torch's.

    Raises:
        TypeError: they are no pair, or one of them is of Keras or TensorFlow.
    """
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise TypeError(f"optimizers has to be a pair (optimizer, schedule), and is {optimizers!r}.")
    optimizer, schedule = optimizers
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizers[0] is a {type(optimizer).__module__}.{type(optimizer).__name__}, and a Keras model on torch "
            "is trained by an optimizer of torch: pass one, as torch.optim.AdamW(model.parameters()), or leave it to "
            "the arguments (optim, learning_rate, weight_decay)."
        )
    if schedule is not None and not callable(getattr(schedule, "step", None)):
        raise TypeError(
            f"optimizers[1] is a {type(schedule).__module__}.{type(schedule).__name__}, and not a schedule of torch: "
            "pass one of torch.optim.lr_scheduler around the optimizer, or leave it to the arguments "
            "(lr_scheduler_type, poly_power, warmup_steps)."
        )


def check_writer(tb_writer: Any) -> None:
    """Refuse a `tb_writer` of TensorFlow.

    Raises:
        TypeError: it has no `add_scalar`.
    """
    if not callable(getattr(tb_writer, "add_scalar", None)):
        raise TypeError(
            f"tb_writer is a {type(tb_writer).__module__}.{type(tb_writer).__name__}: pass a "
            "torch.utils.tensorboard.SummaryWriter, or set report_to='tensorboard'."
        )
