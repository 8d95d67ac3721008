"""Checks of Keras models, and their nn.Module."""

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

# Keras counts over all models of a process: "dense_1".
COUNT_SUFFIX = re.compile(r"_\d+$")
WITHOUT_DECAY = re.compile(r"bias|norm|/(gamma|beta)$", re.IGNORECASE)
OTHER_FRAMEWORKS = {"tensorflow": "TensorFlow", "tf_keras": "TensorFlow", "jax": "JAX", "flax": "JAX"}
ON_TORCH = (
    "Set the environment variable KERAS_BACKEND=torch before keras is imported, as in "
    "`KERAS_BACKEND=torch littrainer run script.py`, and make the model with keras 3"
)


def check_model(model: Any) -> None:
    name = type(model).__name__
    packages = [base.__module__.partition(".")[0] for base in type(model).__mro__]
    backend = next((OTHER_FRAMEWORKS[package] for package in packages if package in OTHER_FRAMEWORKS), None)
    keras: Any = sys.modules.get("keras")
    if backend is None and keras is not None and isinstance(model, keras.Model):
        backend = keras.config.backend()
    if backend is None:
        advice = "Pass it to Trainer" if isinstance(model, nn.Module) else f"Pass a keras.Model. {ON_TORCH}"
        raise TypeError(f"TFTrainer takes a Keras model, and model is a {name}. {advice}.")
    if backend != "torch":
        raise NotImplementedError(f"{name} is a model of {backend}, and littrainer trains on torch. {ON_TORCH}.")


def check_trainable(model: Any) -> None:
    """Raise an error for a train_step or a summed loss without override of run_model."""
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
    """A module around a built Keras model, with the same names in each process."""

    accepts_loss_kwargs = True
    main_input_name = "features"
    keras_model: Any

    def __init__(self, model: Any, run: Callable[[Any, Any, bool], tuple[Any, Any]]):
        super().__init__()
        self.run = run
        # A submodule would duplicate the parameters.
        vars(self)["keras_model"] = model
        self.register_variables()

    def register_variables(self) -> None:
        """Register the current variables, statistics as buffers, which processes synchronize."""
        self._parameters.clear()
        self._buffers.clear()
        layers = self.keras_model._flatten_layers()
        # Moving means for instance; frozen weights are parameters.
        statistics = {id(variable) for layer in layers for variable in layer._non_trainable_variables}
        for name, variable in get_stable_names(self.keras_model).items():
            is_statistic = id(variable) in statistics and torch.is_floating_point(variable.value)
            register: Any = self.register_buffer if is_statistic else self.register_parameter
            register(name, variable.value)
        # Torch modules inside the model have buffers too.
        buffers = {id(buffer): buffer for layer in layers for buffer in layer.buffers()}
        for number, buffer in enumerate(buffers.values()):
            self.register_buffer(f"torch_buffer_{number}", buffer)

    def _apply(self, fn: Any, recurse: bool = True) -> KerasModule:
        # Layers replace their buffers.
        for layer in self.keras_model._flatten_layers():
            layer._apply(fn, recurse)
        self.register_variables()
        return self

    def apply_constraints(self, *after_step: Any) -> None:
        for variable in self.keras_model.trainable_variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    def forward(self, features: Any, labels: Any = None, num_items_in_batch: Any = None) -> dict[str, Any]:
        """Return logits, and with labels the loss divided by the window's instances."""
        loss, logits = self.run(features, labels, self.training)
        if labels is not None:
            return {"loss": mean_over_window(loss, labels, num_items_in_batch), "logits": logits}
        if self.training:
            raise ValueError(
                "A batch to train on has no labels: let each sample of train_dataset be a pair (features, labels)."
            )
        return {"logits": logits}


def get_stable_names(model: Any) -> dict[str, Any]:
    """Name variables by layers counted within the model."""
    metric_ids = {id(variable) for variable in model.metrics_variables}
    names: dict[str, Any] = {}
    parts_below: dict[str, dict[str, str]] = {}
    for variable in model.variables:
        if id(variable) in metric_ids:
            continue
        *parents, last = variable.path.split("/")
        path = ""
        for part in parents:
            renamed = parts_below.setdefault(path, {})
            if part not in renamed:
                renamed[part] = _make_unique(renamed.values(), COUNT_SUFFIX.sub("", part))
            path = f"{path}{renamed[part]}/"
        # A dot would mean a submodule.
        names[_make_unique(names, (path + last).replace(".", "_"))] = variable
    return names


def _make_unique(names: Any, name: str) -> str:
    candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
    return next(candidate for candidate in candidates if candidate not in names)


# ---- Running a model -------------------------------------------------------------------------------------------------


def run_keras_model(model: Any, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
    """Return loss (None without labels) and logits of a batch."""
    import keras

    is_compiled = getattr(model, "compiled", False) and getattr(model, "loss", None) is not None
    if labels is None:
        return None, _split_outputs(model(features, training=training), False)[1]
    if is_compiled or type(model).compute_loss is not keras.Model.compute_loss:
        logits = model(features, training=training)
        return model._compute_loss(features, labels, logits, None, training), logits
    accepted = inspect.signature(model.call).parameters
    by_name = dict(labels) if isinstance(labels, Mapping) and "labels" not in accepted else {"labels": labels}
    keywords = by_name if accepted.keys() >= by_name.keys() else {}
    loss, logits = _split_outputs(model(features, training=training, **keywords), bool(keywords))
    if not isinstance(loss, torch.Tensor):
        raise ValueError(
            f"{type(model).__name__} has no loss: it was not compiled with one, and its call returned none. Call "
            "model.compile(loss=...), return (loss, logits) from a call that takes `labels`, or override run_model."
        )
    return loss, logits


def _split_outputs(outputs: Any, has_labels: bool) -> tuple[Any, Any]:
    if isinstance(outputs, Mapping) and "loss" in outputs:
        loss, logits = outputs["loss"], [value for name, value in outputs.items() if name != "loss"]
    elif isinstance(outputs, (tuple, list)) and len(outputs) > 1 and has_labels:
        loss, *logits = outputs
    else:
        return None, outputs
    return loss, logits[0] if len(logits) == 1 else tuple(logits)


# ---- The mean of losses ----------------------------------------------------------------------------------------------


def count_instances(labels: Any) -> torch.Tensor:
    """Count integer labels other than -100, or rows for other labels; use the first of several counts."""
    while not isinstance(labels, torch.Tensor):
        labels = next(iter(labels.values() if isinstance(labels, Mapping) else labels))
    if labels.is_floating_point() or labels.dim() == 0:
        return torch.tensor(labels.shape[0] if labels.dim() else 1, device=labels.device)
    return labels.ne(PADDING).sum() if labels.dtype.is_signed else torch.ones_like(labels, dtype=torch.int64).sum()


def mean_over_window(loss: torch.Tensor, labels: Any, number_of_instances: Any = None) -> torch.Tensor:
    """Return the contribution of a micro-batch to the mean loss of its window.

    Parameters:
        loss: the loss of each instance, or their mean.
    """
    in_batch = count_instances(labels)
    # Without synchronization of the device.
    total = torch.where(in_batch <= loss.numel(), loss.sum(), loss.mean() * in_batch) if loss.dim() else loss * in_batch
    number = in_batch if number_of_instances is None else number_of_instances
    return total / (number.clamp(min=1) if isinstance(number, torch.Tensor) else max(number, 1))
