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
# Several `loss_type`s name this loss, which predicts the next token.
CAUSAL_LOSS_FUNCTION = "ForCausalLMLoss"
# Packages with wrappers that have the model as `module`.
WRAPPERS = ("torch", "deepspeed")


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model.

    Parameters:
        accepts_loss_kwargs: forward divides the loss by `num_items_in_batch`.
        can_return_loss: forward returns a loss without labels (`return_loss=True` by default).
        shifts_labels: the loss compares each label with the prediction at the previous position.
    """

    forward_arguments: tuple[str, ...]
    accepts_loss_kwargs: bool
    label_names: list[str]
    can_return_loss: bool
    shifts_labels: bool


def read_model_facts(model: nn.Module) -> ModelFacts:
    """Read the facts about a model, or the model inside an adapter."""
    base = base_model(model)
    parameters = inspect.signature(base.forward).parameters
    declared = getattr(base, "accepts_loss_kwargs", None)
    has_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    class_parameters = inspect.signature(type(base).forward).parameters
    return_loss = class_parameters.get("return_loss")
    return ModelFacts(
        forward_arguments=tuple(parameters),
        accepts_loss_kwargs=has_kwargs if declared is None else declared,
        label_names=_find_label_names(type(base), list(class_parameters)),
        can_return_loss=return_loss is not None and return_loss.default is True,
        shifts_labels=_has_shifted_labels(base),
    )


def base_model(model: Any) -> Any:
    """Return the model inside a PEFT adapter or compiled module, or the model itself."""
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
    """Return the name of forward's `**kwargs`, or None."""
    parameters = inspect.signature(base_model(model).forward).parameters.values()
    return next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)


def is_causal_lm(model: Any) -> bool:
    """Look up the name of the class in transformers' table of causal language models."""
    if "transformers" not in sys.modules:
        return False
    model = base_model(model) if is_a(model, "peft model") else model
    names = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return type(model).__name__ in names.values()


def _find_label_names(model_class: type, parameters: list[str]) -> list[str]:
    labels = QUESTION_ANSWERING_LABELS if "QuestionAnswering" in model_class.__name__ else ()
    return [name for name in parameters if "label" in name or name in labels]


def _has_shifted_labels(model: Any) -> bool:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    # Any model with a `loss_type` has imported the table.
    losses = getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", {})
    return getattr(losses.get(getattr(model, "loss_type", None)), "__name__", None) == CAUSAL_LOSS_FUNCTION


def count_parameters_without_embeddings(model: Any) -> int:
    if not any(hasattr(parameter, "ds_numel") for parameter in model.parameters()):
        return model.num_parameters(exclude_embeddings=True)
    # `num_parameters` would count DeepSpeed's local shard.
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return sum(parameter.ds_numel for name, parameter in model.named_parameters() if name not in embeddings)
