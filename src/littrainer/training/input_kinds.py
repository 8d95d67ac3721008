"""What a Trainer is given in the place of something else: a path for a dataset, a class for a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from littrainer.errors.notes import kind_of

BY_KEYWORD = "Give the Trainer's parameters by their names: model=..., args=..., train_dataset=..."


def check_args(args: Any) -> None:
    """Refuse what is no training arguments.

    Raises:
        TypeError: it is something else.
    """
    if hasattr(args, "per_device_train_batch_size") and not isinstance(args, type):
        return
    if isinstance(args, Mapping):
        advice = "Make TrainingArguments(**args) of it."
    elif isinstance(args, type):
        advice = f"Make an instance, as {args.__name__}('folder')."
    elif isinstance(args, str):
        advice = f"Make TrainingArguments({args!r}), where it names the folder for checkpoints."
    else:
        advice = BY_KEYWORD + "."
    raise TypeError(f"args has to be TrainingArguments, and is {_shown(args)}. {advice}")


def check_model_kind(model: Any, model_init: Any) -> None:
    """Refuse what is no model, and what makes none.

    Raises:
        TypeError: one of them is something else.
    """
    if isinstance(model_init, nn.Module) or (model_init is not None and not callable(model_init)):
        advice = "pass it as model" if isinstance(model_init, nn.Module) else "such as a function without parameters"
        raise TypeError(f"model_init has to be a function that makes the model, and is {_shown(model_init)}: {advice}.")
    if model is None or (hasattr(model, "parameters") and not isinstance(model, type)):
        return
    if isinstance(model, str):
        advice = f"Load it first, such as AutoModelForSequenceClassification.from_pretrained({model!r})."
    elif isinstance(model, type):
        advice = f"Make an instance of it, or pass model_init={model.__name__}."
    elif hasattr(model, "model_type"):
        advice = "It is a configuration: make the model of it, such as AutoModelForCausalLM.from_config(config)."
    else:
        advice = BY_KEYWORD + "."
    raise TypeError(f"model has to be a torch.nn.Module, and is {_shown(model)}. {advice}")


def check_is_trainable(model: Any) -> None:
    """Refuse to train integers.

    Raises:
        ValueError: the model is quantized, and has neither adapters nor a quantization that can be trained.
    """
    if not getattr(model, "is_quantized", False) or isinstance(model, torch.Tensor):
        return
    quantizer = getattr(model, "hf_quantizer", None)
    if getattr(quantizer, "is_qat_trainable", False):
        return
    carries_adapters = getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    how = "" if method is None else f" by {getattr(method, 'value', method)}"
    if not carries_adapters:
        raise ValueError(
            f"{type(model).__name__} is quantized{how}, and quantized weights cannot be trained. Add adapters, such as "
            "peft.get_peft_model(model, LoraConfig(...)), or load it without quantization."
        )
    if quantizer is not None and not getattr(quantizer, "is_trainable", True):
        raise ValueError(
            f"{type(model).__name__} is quantized{how}, through which no gradients pass, so that its adapters "
            "cannot be trained either. Load it with another quantization, such as bitsandbytes in 4 bits."
        )


def check_is_dataset(dataset: Any, name: str, method: str) -> None:
    """Refuse what samples cannot be read from, where one dataset is asked for.

    Parameters:
        name: the dataset's, for the error.
        method: the Trainer's method that a loader belongs into.

    Raises:
        TypeError: it is something else than a dataset.
    """
    if isinstance(dataset, DataLoader):
        raise TypeError(
            f"{name} is a {type(dataset).__name__}, and the Trainer makes one from a dataset: pass its dataset, or "
            f"override {method}() to return the loader itself."
        )
    if isinstance(dataset, str):
        raise TypeError(
            f"{name} is text ({dataset!r}), and has to be a dataset: load it first, such as with "
            "datasets.load_dataset(...)."
        )
    if isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name} is {kind_of(dataset)}, which can be gone through only once and has no length: pass list(...) of "
            "it, or a torch.utils.data.IterableDataset whose __iter__ begins anew."
        )
    # A dict of samples numbered from 0 can be read as a list can.
    if isinstance(dataset, Mapping) and 0 not in dataset:
        names = ", ".join(map(repr, dataset))
        raise TypeError(
            f"{name} is {kind_of(dataset)} with {names}, and has to be one dataset: where these are splits, pass "
            f"one of them; where they are columns, pass datasets.Dataset.from_dict(...)."
        )
    if type(dataset).__name__ == "DataFrame" and hasattr(dataset, "iloc"):
        raise TypeError(
            f"{name} is a DataFrame, and has to be a dataset of samples: pass datasets.Dataset.from_pandas(frame), or "
            'frame.to_dict("records").'
        )


def checked_optimizers(optimizers: Any) -> tuple[Any, Any]:
    """The pair of an optimizer and a schedule.

    Raises:
        TypeError: it is no pair, or holds a class.
    """
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise TypeError(
            f"optimizers has to be a pair (optimizer, schedule), and is {_shown(optimizers)}: pass "
            "optimizers=(optimizer, None), and the arguments name the schedule."
        )
    for one in optimizers:
        if isinstance(one, type):
            raise TypeError(
                f"optimizers has the class {one.__name__}: make an instance of it over model.parameters(), or pass "
                f"optimizer_cls_and_kwargs=({one.__name__}, {{...}})."
            )
    return optimizers[0], optimizers[1]


def checked_lightning_keywords(lightning: Any) -> dict[str, Any]:
    """Further keywords of `lightning.Trainer`, as a dict of its own.

    Raises:
        TypeError: they are no dict.
    """
    if lightning is not None and not isinstance(lightning, Mapping):
        raise TypeError(
            f"lightning has to be a dict of keywords for lightning.Trainer, and is {_shown(lightning)}: write "
            'lightning={"profiler": "simple"}, for one.'
        )
    return dict(lightning or {})


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"text ({value!r})" if isinstance(value, str) else kind_of(value)
