"""Facts about a model, read from its class and the signature of its forward."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from littrainer.runtime.lazy_isinstance import is_a

QUESTION_ANSWERING_LABELS = ("start_positions", "end_positions")
# The loss that predicts each token from those before it; several `loss_type`s name it.
CAUSAL_LOSS_FUNCTION = "ForCausalLMLoss"
# Packages whose classes wrap a model that they hold as `module`.
WRAPPERS = ("torch", "deepspeed")


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model.

    Parameters:
        forward_arguments: names of forward's parameters, in order.
        accepts_loss_kwargs: forward takes `num_items_in_batch` and divides its loss by it.
        label_names: the forward parameters that are labels.
        can_return_loss: forward returns a loss without labels (`return_loss=True` by default).
        shifts_labels: the loss compares each label with the prediction one position before.
    """

    forward_arguments: tuple[str, ...]
    accepts_loss_kwargs: bool
    label_names: list[str]
    can_return_loss: bool
    shifts_labels: bool


def read_model_facts(model: nn.Module) -> ModelFacts:
    """Read the facts about a model; an adapter around a model is looked through."""
    base = base_model(model)
    parameters = inspect.signature(base.forward).parameters
    declared = getattr(base, "accepts_loss_kwargs", None)
    takes_any_keyword = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    class_parameters = inspect.signature(type(base).forward).parameters
    return ModelFacts(
        forward_arguments=tuple(parameters),
        accepts_loss_kwargs=takes_any_keyword if declared is None else declared,
        label_names=_label_names(type(base), list(class_parameters)),
        can_return_loss=any(
            name == "return_loss" and parameter.default is True for name, parameter in class_parameters.items()
        ),
        shifts_labels=_shifts_labels(base),
    )


def base_model(model: Any) -> Any:
    """Return the model inside a PEFT adapter or a compiled module; any other model is returned as it is."""
    model = getattr(model, "_orig_mod", model)
    if not is_a(model, "peft model"):
        return model
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model.base_model.model


def unwrap_user_model(model: Any) -> Any:
    """Return the user's model inside data-parallel wrappers and `torch.compile`."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__module__.partition(".")[0] in WRAPPERS:
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def find_catch_all_name(model: Any) -> str | None:
    """Return the name under which the model's forward takes further keywords, such as `kwargs`; None if it does not."""
    parameters = inspect.signature(base_model(model).forward).parameters.values()
    return next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)


def is_causal_lm(model: Any) -> bool:
    """Return whether the model's class is one that transformers lists as a causal language model."""
    # A script's own model may have the name of a class in the table, and then counts as that class.
    if "transformers" not in sys.modules:
        return False
    model = base_model(model) if is_a(model, "peft model") else model
    names = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return type(model).__name__ in names.values()


def _label_names(model_class: type, parameters: list[str]) -> list[str]:
    is_question_answering = "QuestionAnswering" in model_class.__name__
    return [
        name for name in parameters if "label" in name or (is_question_answering and name in QUESTION_ANSWERING_LABELS)
    ]


def _shifts_labels(model: Any) -> bool:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    # The table is loaded wherever a model that has a `loss_type` is defined.
    losses = getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", {})
    return getattr(losses.get(getattr(model, "loss_type", None)), "__name__", None) == CAUSAL_LOSS_FUNCTION


def count_parameters_without_embeddings(model: Any) -> int:
    """Return how many numbers a model has that counts them itself (`num_parameters`), outside of embeddings."""
    if not any(hasattr(parameter, "ds_numel") for parameter in model.parameters()):
        return model.num_parameters(exclude_embeddings=True)
    # The model would count the shard that DeepSpeed has left in this process.
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return sum(parameter.ds_numel for name, parameter in model.named_parameters() if name not in embeddings)
