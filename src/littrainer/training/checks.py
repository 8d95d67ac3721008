"""What a Trainer refuses when it is constructed, before anything is computed."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

from littrainer.arguments.accelerator_config import settle_accelerator_config
from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.arguments.sharding import check_processes
from littrainer.arguments.support import refuse_unsupported
from littrainer.arguments.validation import check_loader_processes
from littrainer.arguments.value_checks import check_values
from littrainer.data.limits import check_limits
from littrainer.data.loaders import has_length
from littrainer.distributed.group import ensure_process_group
from littrainer.distributed.layout import process_layout
from littrainer.errors.notes import kind_of
from littrainer.evaluation.streaming import streaming_metrics
from littrainer.log_levels import apply_log_level
from littrainer.training.input_kinds import check_is_dataset, check_is_trainable, check_model_kind

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)


def check_arguments(args: TrainingArguments) -> None:
    """Refuse arguments that are not supported, and apply the log level.

    Raises:
        TypeError, ValueError: a value was set after construction that cannot be right, or this process trains alone and
            is to share its model.
        NotImplementedError: an argument, or several processes, that are not supported.
    """
    # Scripts set fields after construction too.
    check_values(args)
    settle_accelerator_config(args)
    check_loader_processes(args)
    refuse_unsupported(args)
    # Reading it refuses what it cannot be.
    process_layout(args)
    check_processes(args)
    ensure_process_group(args)
    apply_log_level(args)


def check_model_source(model: Any, model_init: Any) -> None:
    """Refuse a Trainer that is given neither or both of a model and a way to make one.

    Raises:
        RuntimeError: neither is given.
        ValueError: both are given, or a quantized model that cannot be trained.
        TypeError: one of them is something else.
    """
    check_model_kind(model, model_init)
    check_is_trainable(model)
    if model is None and model_init is None:
        raise RuntimeError("Trainer takes a `model` or a `model_init`, and was given neither: pass one of them.")
    if model is not None and model_init is not None:
        raise ValueError("Trainer takes a `model` or a `model_init`, and was given both: pass one of them.")


def check_construction(trainer: Trainer) -> None:
    """Refuse what contradicts itself.

    Raises:
        RuntimeError: optimizers that cannot fit the model.
        ValueError: datasets or metrics that the arguments need and that are missing or empty.
        TypeError: a collator that is not callable, or metrics that are neither a function nor metrics.
    """
    if trainer.is_deepspeed_enabled:
        from littrainer.strategies.deepspeed import check_deepspeed

        args: Any = trainer.args
        check_deepspeed(args, {**(args.lightning or {}), **trainer.lightning_keywords})
    check_limits(trainer)
    _check_optimizers(trainer)
    _check_metrics(trainer)
    _say_if_nothing_is_generated(trainer)
    collator: Any = trainer.data_collator
    if not callable(collator):
        raise TypeError(
            f"data_collator has to be callable, and is {kind_of(collator)}: pass a function of a list of "
            "samples that returns a batch, and datasets by their names, train_dataset=... and eval_dataset=... ."
        )
    # A class such as `dict` may make batches; one whose objects can be called makes collators.
    if isinstance(collator, type) and any("__call__" in vars(base) for base in collator.__mro__):
        raise TypeError(f"data_collator is the class {collator.__name__}: pass an object, {collator.__name__}(...).")
    if trainer.args.max_steps > 0 and trainer.args.num_train_epochs > 0:
        logger.info("max_steps is given, it will override any value given in num_train_epochs")
    dataset = trainer.train_dataset
    if dataset is not None and not has_length(dataset) and trainer.args.max_steps <= 0:
        raise ValueError(
            "The train_dataset has no length, so the number of optimizer steps is not known: set max_steps."
        )


def _check_optimizers(trainer: Trainer) -> None:
    if trainer.optimizer_cls_and_kwargs is not None and trainer.optimizer is not None:
        raise RuntimeError("`optimizers` and `optimizer_cls_and_kwargs` are both given: pass one of them.")
    if trainer.model_init is not None and (trainer.optimizer is not None or trainer.lr_scheduler is not None):
        raise RuntimeError(
            "`model_init` makes a new model at each train(), so `optimizers` made beforehand would hold other "
            "parameters. Override create_optimizer, or pass `optimizer_cls_and_kwargs`."
        )


def _say_if_nothing_is_generated(trainer: Trainer) -> None:
    can_generate = hasattr(trainer, "_gen_kwargs") or trainer._own_methods("prediction_step", "evaluation_loop")
    idle = [name for name in ("predict_with_generate", "generation_config") if getattr(trainer.args, name, None)]
    if idle and not can_generate:
        logger.warning("%s: without effect in a plain Trainer; use Seq2SeqTrainer.", ", ".join(idle))


def _check_metrics(trainer: Trainer) -> None:
    args = trainer.args
    if args.eval_strategy not in (None, IntervalStrategy.NO) and trainer.eval_dataset is None:
        strategy = IntervalStrategy(args.eval_strategy).value
        raise ValueError(
            f"eval_strategy={strategy!r} asks for evaluations, but there is no eval_dataset. Pass one to the Trainer, "
            "or set eval_strategy='no'."
        )
    needs_metric = args.save_strategy == SaveStrategy.BEST or args.load_best_model_at_end
    if needs_metric and args.metric_for_best_model is None:
        raise ValueError(
            "`args.metric_for_best_model` must be provided for save_strategy='best' and load_best_model_at_end: set it "
            "to 'loss', or to a name that compute_metrics returns."
        )
    compute_metrics = trainer.compute_metrics
    if streaming_metrics(compute_metrics) is not None or not args.batch_eval_metrics or compute_metrics is None:
        return
    if "compute_result" not in inspect.signature(compute_metrics).parameters:
        raise ValueError(
            "With batch_eval_metrics=True compute_metrics is called for each batch and needs a `compute_result` "
            "parameter, which is True at the last one."
        )


def check_datasets(trainer: Trainer) -> None:
    """Refuse to train on nothing; a Trainer that only evaluates may have an empty train_dataset.

    Raises:
        ValueError: the train_dataset is empty, or an eval_dataset is that will be evaluated on.
    """
    if trainer.args.eval_strategy not in (None, IntervalStrategy.NO):
        datasets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
        if not datasets:
            raise ValueError("eval_dataset is a dict without any dataset: name one, or set eval_strategy='no'.")
        for name, dataset in datasets.items():
            check_not_empty(dataset, f"eval_dataset {name!r}" if name else "eval_dataset")
        _check_name_of_best_metric(trainer)
    check_not_empty(trainer.train_dataset, "train_dataset")


def _check_name_of_best_metric(trainer: Trainer) -> None:
    # Each evaluation of a dict puts the dataset's name into all its metrics' names, so that others cannot be found.
    wanted, datasets = trainer.args.metric_for_best_model, trainer.eval_dataset
    if wanted is None or not isinstance(datasets, dict) or trainer.overrides_evaluation():
        return
    name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
    if not any(name.startswith(f"eval_{key}_") for key in datasets):
        rest = name.removeprefix("eval_")
        raise KeyError(
            f"metric_for_best_model={wanted!r} means {name!r}, which is not found in the evaluation metrics of a dict "
            "of datasets: their names hold the dataset's. Set metric_for_best_model to "
            f"{' or '.join(repr(f'eval_{key}_{rest}') for key in datasets)}."
        )


def chosen_eval_dataset(of_trainer: Any, wanted: Any) -> Any:
    """The dataset to evaluate on.

    Parameters:
        of_trainer: the Trainer's `eval_dataset`, which may be a dict of them.
        wanted: a dataset, the name of one, or None for the Trainer's.

    Raises:
        ValueError: there is none, or a dict of them and none is named.
        KeyError: none has that name.
    """
    if wanted is None and of_trainer is None:
        raise ValueError("evaluate() needs an eval_dataset: pass one to the Trainer or to evaluate().")
    if not isinstance(wanted, str):
        dataset = of_trainer if wanted is None else wanted
        if isinstance(dataset, dict):
            raise ValueError(
                f"A loader reads one dataset, and eval_dataset is a dict of them ({', '.join(map(str, dataset))}): "
                "name one, as in get_eval_dataloader(name)."
            )
        check_is_dataset(dataset, "eval_dataset", "get_eval_dataloader")
        return dataset
    if not isinstance(of_trainer, dict):
        raise KeyError(
            f"evaluate({wanted!r}) names a dataset, and the Trainer's eval_dataset is no dict of them but a "
            f"{type(of_trainer).__name__}: pass the dataset itself, or eval_dataset={{{wanted!r}: ...}} to the Trainer."
        )
    if wanted not in of_trainer:
        raise KeyError(f"There is no eval_dataset named {wanted!r}; there are {', '.join(map(str, of_trainer))}.")
    check_is_dataset(of_trainer[wanted], f"eval_dataset {wanted!r}", "get_eval_dataloader")
    return of_trainer[wanted]


def check_not_empty(dataset: Any, name: str) -> None:
    """Refuse a dataset of length 0.

    Raises:
        ValueError: it is empty.
    """
    if has_length(dataset) and len(dataset) == 0:
        raise ValueError(
            f"The {name} is empty (length 0): there is nothing to work on. Check how it was filtered or split."
        )
