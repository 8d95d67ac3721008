"""The first lines of a printed program: what stands in for what, and what is not in it."""

from __future__ import annotations

from typing import Any, NamedTuple

from littrainer.arguments.destinations import DESTINATIONS
from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.data.limits import DEVELOPMENT_RUN, LIMITS, OVERFIT
from littrainer.explain.printed_values import described, is_plain, objects_in
from littrainer.explain.report import changed_arguments

# Arguments that the program carries out.
IN_PROGRAM: frozenset[str] = frozenset().union(
    ("output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "max_steps"),
    ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim"),
    ("optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps"),
    ("max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "gradient_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing", "activation_checkpointing_kwargs"),
    ("torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32", "use_cache", "logging_strategy"),
    ("logging_steps", "eval_strategy", "eval_steps", "eval_on_start", "save_strategy", "save_steps"),
    ("save_total_limit", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "seed"),
    ("full_determinism", "use_cpu", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
    ("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    ("dataloader_in_order", "train_sampling_strategy", "do_train", "do_eval", "do_predict", "disable_tqdm"),
    ("lightning",),
)

# What a Trainer was given -> where it would stand in the program.
GIVEN_TO_TRAINER: dict[str, str] = {
    "model": "return it in `make_model`, or name it with --model",
    "train_dataset": "return its rows in `make_rows`, or name it with --data",
    "eval_dataset": "hand it to the DataLoader of the evaluation",
    "data_collator": "hand it to the DataLoaders as `collate_fn`",
    "compute_metrics": "log its metrics in `validation_step`",
    "preprocess_logits_for_metrics": "call it in `validation_step`",
    "compute_loss_func": "call it in `loss`",
    "optimizer": "return it in `make_optimizer`",
    "lr_scheduler": "return it in `make_schedule`",
    "optimizer_cls_and_kwargs": "make it in `make_optimizer`",
}


class Source(NamedTuple):
    """Where the program takes its model and its training data from.

    Parameters:
        model: `module:name` of something that is called to make the model, or the path of a transformers configuration;
            None for a small stand-in.
        data: `module:name` of something that is called to make a map-style dataset of dicts; None for random rows.
    """

    model: str | None = None
    data: str | None = None


NO_SOURCE = Source()


def heading(args: TrainingArguments, source: Source, origin: str, trainer: Any = None) -> str:
    """The program's docstring.

    Parameters:
        source: its model and data.
        origin: whose arguments they are, for the first line.
        trainer: the Trainer of a script, whose objects no text can hold; None where there are arguments alone.
    """
    lines = [f"The training that {origin} describe, as a plain Lightning program.", *_about_stand_ins(source)]
    left_out = [_left_out(args, name) for name in changed_arguments(args) if not is_carried_out(args, name)]
    if left_out:
        lines += ["", "Not in this program:", *left_out]
    if trainer is not None:
        lines += ["", "Objects of the script's Trainer, which a text cannot hold:", *_objects_of(trainer, source)]
    text = "\n".join(lines).replace("\\", "/").replace('"""', "'''")
    return f'"""{text}\n"""'


def is_carried_out(args: TrainingArguments, name: str) -> bool:
    """Whether the program does all that an argument asks for."""
    if name == "train_sampling_strategy":
        return args.train_sampling_strategy in ("random", "sequential")
    if name in ("metric_for_best_model", "greater_is_better"):
        return watches_the_loss(args)
    if name == "lightning":
        further = further_keywords(args)
        # The program counts its optimizer steps from all of the data.
        return is_plain(further) and not any(
            further.get(name) for name in (DEVELOPMENT_RUN, OVERFIT, *LIMITS["training"])
        )
    return name in IN_PROGRAM and not objects_in(getattr(args, name))


def watches_the_loss(args: TrainingArguments) -> bool:
    """Whether checkpoints are ranked by the evaluation loss: a stand-in has no other metric."""
    return args.metric_for_best_model in (None, "loss", "eval_loss")


def further_keywords(args: TrainingArguments) -> dict[str, Any]:
    """Keywords for lightning.Trainer that the arguments name."""
    further: Any = args.lightning
    return dict(further or {})


def _about_stand_ins(source: Source) -> list[str]:
    if source.model is None and source.data is None:
        told = "`StandIn` takes the place of your model and random rows that of your data, so that it runs as it is."
        return ["", told, "Put yours into `make_model` and `make_rows`, or name them with --model and --data."]
    if source.data is None:
        fit = ", which need not fit your model" if source.model and ":" in source.model else ""
        told = f"Random rows take the place of your data{fit}."
        return ["", told, "Put yours into `make_rows`, or name it with --data."]
    if source.model is None:
        told = "`StandIn` takes the place of your model, and reads rows of its own form alone."
        return ["", told, "Put yours into `make_model`, or name it with --model."]
    return []


def _left_out(args: TrainingArguments, name: str) -> str:
    objects = objects_in(getattr(args, name))
    if name in IN_PROGRAM and objects:
        return f"- {name}: {', '.join(objects)}, which a text cannot hold; import it and add it where it belongs."
    return f"- {name}: {DESTINATIONS[name].sentence}"


def _objects_of(trainer: Any, source: Source) -> list[str]:
    from littrainer.callbacks.handler import DefaultFlowCallback
    from littrainer.callbacks.progress import PrinterCallback, ProgressCallback
    from littrainer.seq2seq import Seq2SeqTrainer
    from littrainer.trainer import Trainer

    named = {"model": source.model, "train_dataset": source.data}
    lines = []
    for name, place in GIVEN_TO_TRAINER.items():
        value = getattr(trainer, name, None)
        if value is not None and named.get(name) is None:
            lines.append(f"- {name} ({described(value)}): {place}")
    usual = (DefaultFlowCallback, PrinterCallback, ProgressCallback)
    callbacks = [*trainer.callback_handler.callbacks, *trainer.lightning_callbacks]
    # Trackers come from `report_to`, which is told of above.
    own = [
        callback
        for callback in callbacks
        if not isinstance(callback, usual) and not type(callback).__module__.startswith("littrainer.tracking")
    ]
    place = "rewrite it as a callback of Lightning, unless it is one"
    lines += [f"- callback {type(callback).__name__}: {place}" for callback in own]
    for kind in type(trainer).__mro__:
        if kind in (Trainer, Seq2SeqTrainer):
            break
        methods = [name for name in vars(kind) if callable(vars(kind)[name]) and not name.startswith("__")]
        if methods:
            lines.append(f"- {kind.__name__}, which overrides {', '.join(methods)}: write it into `Training`")
    return lines
