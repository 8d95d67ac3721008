"""Keras models for the Trainer: the check of a model, and an nn.Module that returns loss and logits."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from littrainer.runtime.nested_values import PADDING

# keras.layers.Dense is "dense", "dense_1" and so on, counted over all models of a process.
COUNTED = re.compile(r"_\d+$")
# Variables that weight decay leaves alone: biases, and those of a normalization layer.
WITHOUT_DECAY = re.compile(r"bias|norm|/(gamma|beta)$", re.IGNORECASE)
# First part of the name of a base class's module -> what such a model computes with.
OTHER_FRAMEWORKS = {"tensorflow": "TensorFlow", "tf_keras": "TensorFlow", "jax": "JAX", "flax": "JAX"}
ON_TORCH = (
    "Set the environment variable KERAS_BACKEND=torch before keras is imported, as in "
    "`KERAS_BACKEND=torch littrainer run script.py`, and make the model with keras 3"
)


def check_model(model: Any) -> None:
    """Refuse what is no Keras 3 model on the torch backend."""
    name = type(model).__name__
    packages = [base.__module__.partition(".")[0] for base in type(model).__mro__]
    backend = next((OTHER_FRAMEWORKS[package] for package in packages if package in OTHER_FRAMEWORKS), None)
    # A model of Keras cannot be here before it is imported.
    keras: Any = sys.modules.get("keras")
    if backend is None and keras is not None and isinstance(model, keras.Model):
        backend = keras.config.backend()
    if backend is None:
        advice = "Pass it to Trainer" if isinstance(model, nn.Module) else f"Pass a keras.Model. {ON_TORCH}"
        raise TypeError(f"TFTrainer takes a Keras model, and model is a {name}. {advice}.")
    if backend != "torch":
        raise NotImplementedError(f"{name} is a model of {backend}, and littrainer trains on torch. {ON_TORCH}.")


def check_trainable(model: Any) -> None:
    """Refuse a model that would be trained otherwise than it says, unless run_model is overridden."""
    import keras

    if type(model).train_step is not keras.Model.train_step:
        raise NotImplementedError(
            f"{type(model).__name__} has its own train_step, which a TFTrainer does not call, since it steps the "
            "optimizer itself. Override run_model to return the loss and logits that it computes."
        )
    losses = keras.tree.flatten(getattr(model, "loss", None))
    if any(getattr(loss, "reduction", None) == "sum" for loss in losses):
        raise NotImplementedError(
            f"{type(model).__name__} was compiled with a loss of reduction='sum', and a TFTrainer trains on the mean "
            "over all micro-batches of an optimizer step. Leave the reduction out, and raise the learning rate instead."
        )


class KerasModule(nn.Module):
    """Runs a built Keras model; the names in its state dict are the same in each process.

    The model's own names have a number that counts all layers of a process, and each variable of a Sequential twice.
    """

    # The loss is divided by the instances of the whole window.
    accepts_loss_kwargs = True
    main_input_name = "features"
    keras_model: Any

    def __init__(self, model: Any, run: Callable[[Any, Any, bool], tuple[Any, Any]]):
        super().__init__()
        self.run = run
        # Not one of its modules, whose parameters would be there a second time, under other names.
        vars(self)["keras_model"] = model
        self.register_variables()

    def register_variables(self) -> None:
        """Register the variables that the model has at present, statistics as buffers, which processes share."""
        self._parameters.clear()
        self._buffers.clear()
        layers = self.keras_model._flatten_layers()
        # Variables that a layer computes itself, such as moving means; others of a frozen layer stay parameters.
        computed = {id(variable) for layer in layers for variable in layer._non_trainable_variables}
        for name, variable in get_stable_names(self.keras_model).items():
            is_statistic = id(variable) in computed and torch.is_floating_point(variable.value)
            register: Any = self.register_buffer if is_statistic else self.register_parameter
            register(name, variable.value)
        # Variables are all that Keras knows of; modules of torch inside the model have buffers too.
        buffers = {id(buffer): buffer for layer in layers for buffer in layer.buffers()}
        for number, buffer in enumerate(buffers.values()):
            self.register_buffer(f"torch_buffer_{number}", buffer)

    def _apply(self, fn: Any, recurse: bool = True) -> KerasModule:
        # The parameters stay the same objects; buffers do not.
        for layer in self.keras_model._flatten_layers():
            layer._apply(fn, recurse)
        self.register_variables()
        return self

    def apply_constraints(self, *after_step: Any) -> None:
        """Apply the constraints of variables; the hook after an optimizer step."""
        for variable in self.keras_model.trainable_variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    def forward(self, features: Any, labels: Any = None, num_items_in_batch: Any = None) -> dict[str, Any]:
        """Return loss and logits of a micro-batch, of which the window has so many instances; logits without labels."""
        loss, logits = self.run(features, labels, self.training)
        if labels is not None:
            return {"loss": mean_over_window(loss, labels, num_items_in_batch), "logits": logits}
        if self.training:
            raise ValueError(
                "A batch to train on has no labels: let each sample of train_dataset be a pair (features, labels)."
            )
        return {"logits": logits}


def get_stable_names(model: Any) -> dict[str, Any]:
    """Return a Keras model's variables, random states among them, by names that depend on the model alone.

    Layers of a kind are counted from the first of this model on, in the order of its variables: `dense_7` of the
    second model in a process is `dense` or `dense_1`, as in the first.
    """
    of_metrics = {id(variable) for variable in model.metrics_variables}
    names: dict[str, Any] = {}
    parts_below: dict[str, dict[str, str]] = {}
    for variable in model.variables:
        if id(variable) in of_metrics:
            continue
        *parents, last = variable.path.split("/")
        path = ""
        for part in parents:
            known = parts_below.setdefault(path, {})
            if part not in known:
                known[part] = _make_unique(known.values(), COUNTED.sub("", part))
            path = f"{path}{known[part]}/"
        # A name with a dot would be that of a parameter inside a module.
        names[_make_unique(names, (path + last).replace(".", "_"))] = variable
    return names


def _make_unique(taken: Any, name: str) -> str:
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return name if name not in taken else next(free for free in numbered if free not in taken)


# ---- Running a model -------------------------------------------------------------------------------------------------


def run_keras_model(model: Any, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
    """Return loss and logits of a batch; the loss is None if there are no labels.

    The loss is that of `compile` or `compute_loss`, with regularization; else the model returns it, called with the
    labels if its `call` takes them.
    """
    import keras

    is_compiled = getattr(model, "compiled", False) and getattr(model, "loss", None) is not None
    if labels is None:
        return None, _loss_and_logits(model(features, training=training), False)[1]
    if is_compiled or type(model).compute_loss is not keras.Model.compute_loss:
        logits = model(features, training=training)
        return model._compute_loss(features, labels, logits, None, training), logits
    accepted = inspect.signature(model.call).parameters
    given = dict(labels) if isinstance(labels, Mapping) and "labels" not in accepted else {"labels": labels}
    keywords = given if accepted.keys() >= given.keys() else {}
    loss, logits = _loss_and_logits(model(features, training=training, **keywords), bool(keywords))
    if not isinstance(loss, torch.Tensor):
        raise ValueError(
            f"{type(model).__name__} has no loss: it was not compiled with one, and its call returned none. Call "
            "model.compile(loss=...), return (loss, logits) from a call that takes `labels`, or override run_model."
        )
    return loss, logits


def _loss_and_logits(outputs: Any, was_given_labels: bool) -> tuple[Any, Any]:
    if isinstance(outputs, Mapping) and "loss" in outputs:
        loss, others = outputs["loss"], [value for name, value in outputs.items() if name != "loss"]
    elif isinstance(outputs, (tuple, list)) and len(outputs) > 1 and was_given_labels:
        loss, *others = outputs
    else:
        return None, outputs
    return loss, others[0] if len(others) == 1 else tuple(others)


# ---- The mean of losses ----------------------------------------------------------------------------------------------


def count_instances(labels: Any) -> torch.Tensor:
    """Return the number of whole labels that are not -100, else of rows; of several labels, the first counts."""
    while not isinstance(labels, torch.Tensor):
        labels = next(iter(labels.values() if isinstance(labels, Mapping) else labels))
    if labels.is_floating_point() or labels.dim() == 0:
        return torch.tensor(labels.shape[0] if labels.dim() else 1, device=labels.device)
    return labels.ne(PADDING).sum() if labels.dtype.is_signed else torch.ones_like(labels, dtype=torch.int64).sum()


def mean_over_window(loss: torch.Tensor, labels: Any, number_of_instances: Any = None) -> torch.Tensor:
    """Return the share of a micro-batch in the mean loss of its window, whose instances are given.

    Losses of all instances are summed, and a mean counts as often as the micro-batch has instances.
    """
    in_batch = count_instances(labels)
    # Distinguished on the device, without waiting for it.
    total = torch.where(in_batch <= loss.numel(), loss.sum(), loss.mean() * in_batch) if loss.dim() else loss * in_batch
    number = in_batch if number_of_instances is None else number_of_instances
    return total / (number.clamp(min=1) if isinstance(number, torch.Tensor) else max(number, 1))
