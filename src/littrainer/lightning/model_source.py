"""Where the model of a module comes from: an object, a name, a description in a checkpoint, or a function."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn

from littrainer.checkpoint.weights import without_wrappers
from littrainer.ecosystem import is_a
from littrainer.errors.notes import kind_of

# What a module can be given for its model.
ModelSource: TypeAlias = nn.Module | str | os.PathLike[str] | Mapping[str, Any] | Callable[..., nn.Module]

# Keys of a description: the class, its configuration as a dict, and the name that the model was loaded by.
CLASS, CONFIG, NAME = "class", "config", "name"


def made_at_once(source: ModelSource | None, model_class: Any = None) -> nn.Module | None:
    """The model that a source stands for; None where the source is a function, which is called later.

    Parameters:
        source: the model; a name or folder for `from_pretrained`; a description, as `description_of` gives it; or a
            function that makes it.
        model_class: the class of a model that is loaded by name, or its name in transformers; by default the one that
            the configuration says.

    Raises:
        TypeError: it is none of these.
        ValueError: there is no source, or it does not say which class the model has.
        ImportError: transformers, which loads models by name, is not installed.
    """
    if isinstance(source, nn.Module):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _loaded(os.fspath(source), model_class)
    if isinstance(source, Mapping):
        return _from_description(source)
    if source is None:
        raise ValueError(
            "TransformersModule needs a model: a module, a name or folder for from_pretrained, or a function that "
            "makes it. For one of load_from_checkpoint, whose checkpoint does not say how its model is made, pass "
            "load_from_checkpoint(path, model=...)."
        )
    if callable(source):
        return None
    raise TypeError(
        f"The model is {kind_of(source)}; give a torch.nn.Module, a name or folder for from_pretrained, or a function "
        "that makes the model."
    )


def made_by(function: Callable[..., Any]) -> nn.Module:
    """The model that a function makes.

    Raises:
        TypeError: it makes something else.
    """
    model = function()
    if not isinstance(model, nn.Module):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise TypeError(f"{name}(), which is to make the model, returned {kind_of(model)} and no torch.nn.Module.")
    return model


def description_of(model: nn.Module | None, name: str | None = None) -> dict[str, Any] | None:
    """How a model is made anew, as plain values; None where only its user knows.

    Parameters:
        name: what it was loaded by.
    """
    model = None if model is None else without_wrappers(model)
    if model is None or not is_a(model, "pretrained model") or is_a(model, "peft model"):
        return None
    known: Any = model
    # FSDP2 gives a model a class of its own, made of its own mark and the model's.
    model_class = type(model).__bases__[-1] if is_a(model, "resharding module") else type(model)
    # A class that transformers does not have is its script's.
    if getattr(_transformers(), model_class.__name__, None) is not model_class:
        return None
    return {CLASS: model_class.__name__, CONFIG: _plain(known.config.to_diff_dict()), **({NAME: name} if name else {})}


def _loaded(name: str, model_class: Any) -> nn.Module:
    transformers = _transformers()
    if isinstance(model_class, str):
        model_class = _class_named(model_class)
    if model_class is None:
        config = transformers.AutoConfig.from_pretrained(name)
        architectures = getattr(config, "architectures", None) or []
        if not architectures:
            raise ValueError(
                f"The configuration of {name!r} does not say which class its model has (architectures). Name one, such "
                'as model_class="AutoModelForSequenceClassification".'
            )
        model_class = _class_named(architectures[0])
    return model_class.from_pretrained(name)


def _from_description(description: Mapping[str, Any]) -> nn.Module:
    if not isinstance(description.get(CLASS), str) or not isinstance(description.get(CONFIG), Mapping):
        raise ValueError(
            f"A model described by a dict needs {CLASS!r}, a class of transformers, and {CONFIG!r}, its configuration; "
            f"this one has {', '.join(map(repr, description)) or 'nothing'}."
        )
    model_class = _class_named(description[CLASS])
    return model_class(model_class.config_class.from_dict(dict(description[CONFIG])))


def _class_named(name: str) -> Any:
    found = getattr(_transformers(), name, None)
    if not isinstance(found, type):
        raise ValueError(f"transformers has no model class {name!r}. Pass the model itself, or another model_class.")
    return found


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "Models are loaded by name with transformers, which is not installed: pip install transformers, or pass "
            "the model itself."
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)
