"""Checks of a Trainer's parameters, and of a training before it begins."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.arguments.deepspeed import check_deepspeed_unchanged
from littrainer.arguments.rules import (
    apply_global_batch_size,
    check_loader_processes,
    check_nonfinite_arguments,
    check_values,
    refuse_unsupported,
)
from littrainer.arguments.sharding import check_processes, get_sharding_plan
from littrainer.data.limits import check_limits, get_lightning_keywords
from littrainer.data.sharding import get_length
from littrainer.distributed.group import ensure_process_group
from littrainer.distributed.layout import get_process_layout, tensor_parallel_size
from littrainer.evaluation.streaming import make_streaming_metrics
from littrainer.loop.chunked_loss import find_head
from littrainer.loop.loss import reduces_to_micro_batch_mean
from littrainer.loop.overrides import accept_earlier_signatures, find_overrides, refuse_ignored_overrides
from littrainer.runtime.log_levels import apply_log_level
from littrainer.runtime.notes import kind_of

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

# Environment variable of `littrainer check`: id of the checked process.
CHECKED_PROCESS = "LITTRAINER_CHECKED_PROCESS"
KEYWORD_HINT = "Give the Trainer's parameters by their names: model=..., args=..., train_dataset=..."


def check_args(args: Any) -> None:
    if hasattr(args, "per_device_train_batch_size") and not isinstance(args, type):
        return
    advice = KEYWORD_HINT + "."
    if isinstance(args, Mapping):
        advice = "Make TrainingArguments(**args) of it."
    elif isinstance(args, type):
        advice = f"Make an instance, as {args.__name__}('folder')."
    elif isinstance(args, str):
        advice = f"Make TrainingArguments({args!r}), where it names the folder for checkpoints."
    raise TypeError(f"args has to be TrainingArguments, and is {_format_value(args)}. {advice}")


def check_model_kind(model: Any, model_init: Any) -> None:
    if isinstance(model_init, nn.Module) or (model_init is not None and not callable(model_init)):
        advice = "pass it as model" if isinstance(model_init, nn.Module) else "such as a function without parameters"
        raise TypeError(
            f"model_init has to be a function that makes the model, and is {_format_value(model_init)}: {advice}."
        )
    if model is None or (hasattr(model, "parameters") and not isinstance(model, type)):
        return
    advice = KEYWORD_HINT + "."
    if isinstance(model, str):
        advice = f"Load it first, such as AutoModelForSequenceClassification.from_pretrained({model!r})."
    elif isinstance(model, type):
        advice = f"Make an instance of it, or pass model_init={model.__name__}."
    elif hasattr(model, "model_type"):
        advice = "It is a configuration: make the model of it, such as AutoModelForCausalLM.from_config(config)."
    raise TypeError(f"model has to be a torch.nn.Module, and is {_format_value(model)}. {advice}")


def check_is_trainable(model: Any) -> None:
    """Raise for a quantized model without adapters, or with a quantization that blocks gradients."""
    quantizer = getattr(model, "hf_quantizer", None)
    is_trainable = isinstance(model, torch.Tensor) or getattr(quantizer, "is_qat_trainable", False)
    if not getattr(model, "is_quantized", False) or is_trainable:
        return
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    how = "" if method is None else f" by {getattr(method, 'value', method)}"
    if not (getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")):
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
    """Raise a TypeError unless samples can be read from `dataset`.

    Parameters:
        method: the Trainer's method that returns its loader.
    """
    if isinstance(dataset, DataLoader):
        found = f"a {type(dataset).__name__}, and the Trainer makes one from a dataset"
        advice = f"pass its dataset, or override {method}() to return the loader itself"
    elif isinstance(dataset, str):
        found = f"text ({dataset!r}), and has to be a dataset"
        advice = "load it first, such as with datasets.load_dataset(...)"
    elif isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset):
        found = f"{kind_of(dataset)}, which can be gone through only once and has no length"
        advice = "pass list(...) of it, or a torch.utils.data.IterableDataset whose __iter__ begins again"
    elif type(dataset).__name__ == "DataFrame" and hasattr(dataset, "iloc"):
        found = "a DataFrame, and has to be a dataset of samples"
        advice = 'pass datasets.Dataset.from_pandas(frame), or frame.to_dict("records")'
    # A dict with keys from 0 can be read like a list.
    elif isinstance(dataset, Mapping) and 0 not in dataset:
        names = ", ".join(map(repr, dataset))
        found = f"{kind_of(dataset)} with {names}, and has to be one dataset"
        advice = (
            "where these are splits, pass one of them; where they are columns, pass datasets.Dataset.from_dict(...)"
        )
    else:
        return
    raise TypeError(f"{name} is {found}: {advice}.")


def validate_optimizers(optimizers: Any) -> tuple[Any, Any]:
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise TypeError(
            f"optimizers has to be a pair (optimizer, schedule), and is {_format_value(optimizers)}: pass "
            "optimizers=(optimizer, None), and the arguments name the schedule."
        )
    for part in optimizers:
        if isinstance(part, type):
            raise TypeError(
                f"optimizers has the class {part.__name__}: make an instance of it over model.parameters(), or pass "
                f"optimizer_cls_and_kwargs=({part.__name__}, {{...}})."
            )
    return optimizers[0], optimizers[1]


def validate_lightning_keywords(lightning: Any) -> dict[str, Any]:
    if lightning is not None and not isinstance(lightning, Mapping):
        raise TypeError(
            f"lightning has to be a dict of keywords for lightning.Trainer, and is {_format_value(lightning)}: write "
            'lightning={"profiler": "simple"}, for one.'
        )
    return dict(lightning or {})


def _format_value(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"text ({value!r})" if isinstance(value, str) else kind_of(value)


def check_arguments(args: TrainingArguments) -> None:
    """Raise for invalid arguments, and apply the log level."""
    # Again, since scripts set fields after construction.
    check_values(args)
    normalize_accelerator_config(args)
    check_loader_processes(args)
    refuse_unsupported(args)
    # Raises for an invalid layout.
    get_process_layout(args)
    check_processes(args)
    ensure_process_group(args)
    apply_log_level(args)


def check_model_source(model: Any, model_init: Any) -> None:
    check_model_kind(model, model_init)
    check_is_trainable(model)
    if (model is None) == (model_init is None):
        error, number = (RuntimeError, "neither") if model is None else (ValueError, "both")
        raise error(f"Trainer takes a `model` or a `model_init`, and was given {number}: pass one of them.")


def check_construction(trainer: Any) -> None:
    """Raise for unusable optimizers, missing datasets or metrics, and invalid collators."""
    if trainer.is_deepspeed_enabled:
        from littrainer.strategies.deepspeed import check_deepspeed

        check_deepspeed(trainer.args, get_lightning_keywords(trainer))
    check_limits(trainer)
    if trainer.optimizer_cls_and_kwargs is not None and trainer.optimizer is not None:
        raise RuntimeError("`optimizers` and `optimizer_cls_and_kwargs` are both given: pass one of them.")
    if trainer.model_init is not None and (trainer.optimizer is not None or trainer.lr_scheduler is not None):
        raise RuntimeError(
            "`model_init` makes a new model at each train(), so `optimizers` made beforehand would hold other "
            "parameters. Override create_optimizer, or pass `optimizer_cls_and_kwargs`."
        )
    _check_metrics(trainer.args, trainer.compute_metrics, trainer.eval_dataset)
    generates = hasattr(trainer, "_gen_kwargs") or find_overrides(trainer, "prediction_step", "evaluation_loop")
    unused = [name for name in ("predict_with_generate", "generation_config") if getattr(trainer.args, name, None)]
    if unused and not generates:
        logger.warning("%s: without effect in a plain Trainer; use Seq2SeqTrainer.", ", ".join(unused))
    collator: Any = trainer.data_collator
    if not callable(collator):
        raise TypeError(
            f"data_collator has to be callable, and is {kind_of(collator)}: pass a function of a list of "
            "samples that returns a batch, and datasets by their names, train_dataset=... and eval_dataset=... ."
        )
    # A class such as `dict` may make batches; a class with `__call__` makes collators.
    if isinstance(collator, type) and any("__call__" in vars(base) for base in collator.__mro__):
        raise TypeError(f"data_collator is the class {collator.__name__}: pass an object, {collator.__name__}(...).")
    if trainer.args.max_steps > 0 and trainer.args.num_train_epochs > 0:
        logger.info("max_steps is given, it will override any value given in num_train_epochs")
    dataset = trainer.train_dataset
    if dataset is not None and get_length(dataset) is None and trainer.args.max_steps <= 0:
        raise ValueError(
            "The train_dataset has no length, so the number of optimizer steps is not known: set max_steps."
        )


def _check_metrics(args: TrainingArguments, compute_metrics: Any, eval_dataset: Any) -> None:
    if args.eval_strategy not in (None, IntervalStrategy.NO) and eval_dataset is None:
        strategy = IntervalStrategy(args.eval_strategy).value
        raise ValueError(
            f"eval_strategy={strategy!r} asks for evaluations, but there is no eval_dataset. Pass one to the Trainer, "
            "or set eval_strategy='no'."
        )
    for name, is_set in (("eval_minutes", args.eval_minutes is not None), ("eval_at_end", args.eval_at_end)):
        if is_set and eval_dataset is None:
            raise ValueError(f"{name} asks for evaluations, but there is no eval_dataset. Pass one to the Trainer.")
    needs_metric = args.save_strategy == SaveStrategy.BEST or args.load_best_model_at_end
    if needs_metric and args.metric_for_best_model is None:
        raise ValueError(
            "`args.metric_for_best_model` must be provided for save_strategy='best' and load_best_model_at_end: set it "
            "to 'loss', or to a name that compute_metrics returns."
        )
    if make_streaming_metrics(compute_metrics) is not None or not args.batch_eval_metrics or compute_metrics is None:
        return
    if "compute_result" not in inspect.signature(compute_metrics).parameters:
        raise ValueError(
            "With batch_eval_metrics=True compute_metrics is called for each batch and needs a `compute_result` "
            "parameter, which is True at the last one."
        )


def check_datasets(args: TrainingArguments, train_dataset: Any, eval_dataset: Any, own_evaluation: bool) -> None:
    """Raise for empty datasets, and for an unknown `metric_for_best_model`.

    Parameters:
        own_evaluation: a subclass evaluates, so metrics may have any name.
    """
    if args.eval_strategy not in (None, IntervalStrategy.NO) or args.eval_at_end:
        datasets = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
        if not datasets:
            raise ValueError("eval_dataset is a dict without any dataset: name one, or set eval_strategy='no'.")
        for name, dataset in datasets.items():
            check_not_empty(dataset, f"eval_dataset {name!r}" if name else "eval_dataset")
        if isinstance(eval_dataset, dict) and not own_evaluation:
            _check_name_of_best_metric(args.metric_for_best_model, eval_dataset)
    check_not_empty(train_dataset, "train_dataset")


def _check_name_of_best_metric(metric: str | None, datasets: dict[str, Any]) -> None:
    # With a dict of datasets names of metrics include the dataset's.
    if metric is None:
        return
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    if not any(name.startswith(f"eval_{key}_") for key in datasets):
        rest = name.removeprefix("eval_")
        raise KeyError(
            f"metric_for_best_model={metric!r} means {name!r}, which is not found in the evaluation metrics of a dict "
            "of datasets: their names hold the dataset's. Set metric_for_best_model to "
            f"{' or '.join(repr(f'eval_{key}_{rest}') for key in datasets)}."
        )


def select_eval_dataset(default: Any, override: Any) -> Any:
    """Return the default, the override or the dataset that it names.

    Parameters:
        override: a dataset, the name of a dataset, or None for the default.
    """
    if override is None and default is None:
        raise ValueError("evaluate() needs an eval_dataset: pass one to the Trainer or to evaluate().")
    if not isinstance(override, str):
        dataset = default if override is None else override
        if isinstance(dataset, dict):
            raise ValueError(
                f"A loader reads one dataset, and eval_dataset is a dict of them ({', '.join(map(str, dataset))}): "
                "name one, as in get_eval_dataloader(name)."
            )
        check_is_dataset(dataset, "eval_dataset", "get_eval_dataloader")
        return dataset
    if not isinstance(default, dict):
        raise KeyError(
            f"evaluate({override!r}) names a dataset, and the Trainer's eval_dataset is no dict of them but a "
            f"{type(default).__name__}: pass the dataset itself, or eval_dataset={{{override!r}: ...}} to the Trainer."
        )
    if override not in default:
        raise KeyError(f"There is no eval_dataset named {override!r}; there are {', '.join(map(str, default))}.")
    check_is_dataset(default[override], f"eval_dataset {override!r}", "get_eval_dataloader")
    return default[override]


def check_not_empty(dataset: Any, name: str) -> None:
    if get_length(dataset) == 0:
        raise ValueError(
            f"The {name} is empty (length 0): there is nothing to work on. Check how it was filtered or split."
        )


def check_before_training(trainer: Any) -> None:
    if os.environ.get(CHECKED_PROCESS, str(os.getpid())) != str(os.getpid()):
        raise RuntimeError("`littrainer check` lets no child process train: check a script that calls train() itself.")
    refuse_unsupported(trainer.args)
    apply_global_batch_size(trainer.args)
    # Again, since scripts may have set methods on the instance.
    refuse_ignored_overrides(trainer)
    accept_earlier_signatures(trainer)
    if trainer.args.loss_normalization == "exact" and reduces_to_micro_batch_mean(trainer):
        raise ValueError(
            f'loss_normalization="exact" and {type(trainer).__name__}, whose compute_loss or training_step does not '
            "take num_items_in_batch: add that parameter, and divide the sum of the micro-batch's losses by it."
        )
    check_deepspeed_unchanged(trainer.args, trainer.is_deepspeed_enabled)
    is_version_1 = getattr(get_sharding_plan(trainer.args), "version", None) == 1
    check_nonfinite_arguments(trainer.args, splits_weights=is_version_1 or tensor_parallel_size(trainer.args) > 1)
    if trainer.args.log_loss_terms:
        try:
            inspect.signature(trainer.compute_loss).bind(None, None, return_outputs=True)
        except TypeError:
            raise ValueError(
                f"log_loss_terms=True calls {type(trainer).__name__}.compute_loss(model, inputs, return_outputs=True), "
                "which does not take these: add return_outputs=False to its parameters, or leave out log_loss_terms."
            ) from None
    if trainer.args.chunked_loss:
        _check_chunked_loss(trainer, is_version_1)
    needs_full_model = trainer.args.auto_micro_batch or trainer.args.ema_decay is not None
    is_sharded = needs_full_model and (
        trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.get_tp_size() > 1
    )
    if trainer.args.auto_micro_batch:
        reasons = {
            "FSDP, DeepSpeed and tensor parallelism let the processes wait for each other within each pass": is_sharded,
            'a strategy in lightning={"strategy": ...} may let them wait too': "strategy"
            in get_lightning_keywords(trainer),
            "an overridden training_step runs forward and backward itself": trainer.overrides_training_step(),
        }
        for reason in (reason for reason, applies in reasons.items() if applies):
            raise ValueError(f"auto_micro_batch does passes again, and {reason}: lower per_device_train_batch_size.")
    if trainer.args.ema_decay is not None and is_sharded:
        splits = "FSDP, DeepSpeed and tensor parallelism split them"
        raise ValueError(f"ema_decay averages whole weights, and {splits}: train without, or leave ema_decay unset.")
    check_datasets(trainer.args, trainer.train_dataset, trainer.eval_dataset, trainer.overrides_evaluation())
    if trainer.args.max_tokens_per_batch is not None and trainer.args.eval_strategy != IntervalStrategy.NO:
        # Making the loader raises for samples without a length or too long samples.
        for name in trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else (None,):
            trainer.get_eval_dataloader(name)


def _check_chunked_loss(trainer: Any, is_version_1: bool) -> None:
    reasons = {
        "compute_loss_func, which takes logits": trainer.compute_loss_func is not None,
        "use_liger_kernel, which computes no logits either": trainer.args.use_liger_kernel,
        "DeepSpeed, FSDP version 1 or tensor parallelism, which split the head": is_version_1
        or trainer.is_deepspeed_enabled
        or trainer.get_tp_size() > 1,
    }
    for reason in (reason for reason, applies in reasons.items() if applies):
        raise ValueError(f"chunked_loss=True cannot be combined with {reason}: leave out one of them.")
    if trainer.model is not None:
        find_head(trainer.model)


def normalize_accelerator_config(args: TrainingArguments) -> None:
    """Convert the config and let its `num_steps` replace a `gradient_accumulation_steps` of 1."""
    config = args.accelerator_config = AcceleratorConfig.from_argument(args.accelerator_config)
    steps = (config.gradient_accumulation_kwargs or {}).get("num_steps", args.gradient_accumulation_steps)
    if args.gradient_accumulation_steps == 1:
        args.gradient_accumulation_steps = steps
    elif steps != args.gradient_accumulation_steps:
        raise ValueError(
            "The `AcceleratorConfig`'s `num_steps` is set but `gradient_accumulation_steps` is greater than 1: "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}, and accelerator_config asks for "
            f"gradient_accumulation_kwargs={{'num_steps': {steps}}}. Set only one of them."
        )
    if config.non_blocking and not args.dataloader_pin_memory:
        logger.warning(
            "accelerator_config has non_blocking=True, and copies from memory that is not pinned block anyway; set "
            "dataloader_pin_memory=True."
        )
