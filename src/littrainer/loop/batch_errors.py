"""Notes on an error: its batch, and advice from a table of messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from littrainer.data.collators import LABEL_NAMES, TEXT_LABELS, find_text
from littrainer.data.columns import advise_on_model_kind, read_first_sample, suggest_renaming
from littrainer.data.workers import MAX_NAMED, READING
from littrainer.model.facts import base_model
from littrainer.runtime.nested_values import describe
from littrainer.runtime.notes import add_note

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState
    from littrainer.callbacks.trainer_context import TrainerContext
    from littrainer.evaluation.loop import EvaluationLoop


def note_batch(error: Exception, trainer: TrainerContext, doing: str, batch: Any, evaluates: bool = False) -> None:
    """Add notes with the batch and advice to an error without notes.

    Parameters:
        doing: what the error interrupted, such as "with a batch".
    """
    # littrainer's own errors, such as for a failure in another process, are not about this batch.
    if getattr(error, "__notes__", None) or type(error).__module__.startswith("littrainer."):
        return
    # An error here must not replace the first.
    with suppress(Exception):
        state = trainer.state if trainer.is_in_train else None
        add_note(error, f"It came up {doing}{_format_step(trainer.args, state, evaluates)}{_describe_batch(batch)}.")
        sample = partial(read_first_sample, trainer, evaluates)
        for sentence in advise(ErrorContext(error, base_model(trainer.model), batch, trainer.args, evaluates, sample)):
            add_note(error, sentence)


@contextmanager
def note_reading_errors(trainer: TrainerContext, evaluation: EvaluationLoop | None = None) -> Iterator[None]:
    """Run a block that reads data, and add notes with the samples to its errors."""
    try:
        yield
    except Exception as error:
        if hasattr(error, READING):
            note_batch(error, trainer, getattr(error, READING), None, evaluation is not None)
        elif evaluation is not None and evaluation.batch is not None:
            note_batch(error, trainer, "with a batch", evaluation.batch, evaluates=True)
        raise


def _format_step(args: TrainingArguments, state: TrainerState | None, evaluates: bool) -> str:
    process = f" in process {args.process_index}" if args.world_size > 1 else ""
    if state is None:
        return f" of an evaluation{process}"
    step, last = state.global_step, state.max_steps
    if evaluates:
        return f" of the evaluation at optimizer step {step} of {last}{process}"
    return f" of optimizer step {min(step + 1, last)} of {last}{process}"


def _describe_batch(batch: Any) -> str:
    if not isinstance(batch, Mapping) or not batch:
        return "" if batch is None else f": {type(batch).__name__}"
    entries = [f"{name} {_describe_entry(value)}" for name, value in list(batch.items())[:MAX_NAMED]]
    return f": {'; '.join(entries)}" + ("; ..." if len(batch) > MAX_NAMED else "")


def _describe_entry(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    limits = _find_range(value)
    range_text = ""
    if limits is not None:
        least, greatest = (f"{number:.4g}" if isinstance(number, float) else str(number) for number in limits)
        range_text = f", all {least}" if least == greatest else f" from {least} to {greatest}"
    return f"{describe(value)}{range_text}"


# ---- Advice ----------------------------------------------------------------------------------------------------------


class ErrorContext(NamedTuple):
    """An error with the unwrapped model, its batch and a function that returns the first sample."""

    error: BaseException
    model: Any
    batch: Any
    args: TrainingArguments
    evaluates: bool
    sample: Callable[[], Any] = dict


def advise(context: ErrorContext) -> list[str]:
    text = f"{type(context.error).__name__}: {context.error}"
    advice = [rule if isinstance(rule, str) else rule(context) for pattern, rule in RULES if re.search(pattern, text)]
    return [sentence for sentence in advice if sentence is not None]


def _find_range(value: Any) -> tuple[Any, Any] | None:
    """Return minimum and maximum, computed on the host, since a device may have failed."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.numel() or value.is_complex():
        return None
    least, greatest = value.aminmax() if value.dtype is not torch.bool else (value.min(), value.max())
    return least.item(), greatest.item()


def _find_entry(context: ErrorContext, *names: str) -> tuple[str, torch.Tensor] | None:
    if isinstance(context.batch, Mapping):
        for name in names:
            if isinstance(context.batch.get(name), torch.Tensor):
                return name, context.batch[name]
    return None


def _find_integers(context: ErrorContext, *names: str) -> tuple[str, int, int] | None:
    """Return the first named entry with its range, or None."""
    entry = _find_entry(context, *names)
    limits = None if entry is None or entry[1].is_floating_point() else _find_range(entry[1])
    return None if entry is None or limits is None else (entry[0], *limits)


def _advise_on_token_ids(context: ErrorContext) -> str | None:
    numbers = _find_integers(context, "input_ids", "decoder_input_ids")
    try:
        size = int(context.model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError, TypeError):
        return None
    if numbers is None:
        return None
    name, least, greatest = numbers
    if least < 0:
        return f"{name} has {least}: pad it with tokenizer.pad_token_id; only labels are padded with -100."
    if greatest >= size:
        return (
            f"{name} goes up to {greatest}, and {type(context.model).__name__} has {size} token embeddings, for 0 to "
            f"{size - 1}: take the tokenizer that belongs to the model, or call "
            "model.resize_token_embeddings(len(tokenizer)) where tokens were added."
        )
    return None


def _advise_on_sample_length(context: ErrorContext) -> str | None:
    entry = _find_entry(context, "input_ids", "inputs_embeds")
    config = getattr(context.model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if entry is None or entry[1].dim() < 2 or not isinstance(positions, int):
        return None
    if "roberta" in str(getattr(config, "model_type", "")):
        # Positions of these models begin after the number of the padding token.
        positions -= (getattr(config, "pad_token_id", None) or 0) + 1
    length = entry[1].shape[1]
    if length <= positions:
        return None
    return (
        f"The samples have {length} tokens, and {type(context.model).__name__} has {positions} positions: tokenize "
        f"with truncation=True and max_length={positions}."
    )


def _advise_on_classes(context: ErrorContext) -> str | None:
    numbers = _find_integers(context, "labels", "label")
    if numbers is None:
        return None
    name, least, greatest = numbers
    classes = getattr(getattr(context.model, "config", None), "num_labels", None)
    if "Classification" not in type(context.model).__name__ or not isinstance(classes, int):
        return f"{name} has numbers from {least} to {greatest}; they have to be from 0 to the number of classes less 1."
    if least >= 0 and greatest < classes:
        return None
    fix = "" if least < 0 else f"load it with num_labels={greatest + 1} or more, or "
    return (
        f"{name} has numbers from {least} to {greatest}, and {type(context.model).__name__} has {classes} classes "
        f"(config.num_labels), for 0 to {classes - 1}: {fix}number the labels from 0; -100 stands for a label to "
        "leave out."
    )


def _advise_on_label_type(context: ErrorContext) -> str | None:
    entry = _find_entry(context, "labels", "label")
    if entry is None or not entry[1].is_floating_point():
        return None
    kind = str(entry[1].dtype).removeprefix("torch.")
    return (
        f"{entry[0]} is {kind}, which a classification takes for several labels a sample: give whole "
        'numbers for one of several classes, a number for each class with problem_type="multi_label_classification", '
        "or load the model with num_labels=1 for a regression."
    )


def _advise_on_label_shape(context: ErrorContext) -> str | None:
    entry, ids = _find_entry(context, "labels", "label"), _find_entry(context, "input_ids")
    if entry is None or ids is None or "SequenceClassification" not in type(context.model).__name__:
        return None
    return (
        f"{entry[0]} has the shape {tuple(entry[1].shape)}, and {type(context.model).__name__} takes one number for "
        f"each of the {ids[1].shape[0]} samples: give each sample one label, or load the model of another task, such "
        "as AutoModelForTokenClassification for a label on each token."
    )


def _advise_on_missing_input(context: ErrorContext) -> str | None:
    name = re.search(r"positional arguments?: '(\w+)'", str(context.error))
    missing = "input_ids" if name is None else name.group(1)
    if not isinstance(context.batch, Mapping) or missing in context.batch:
        return None
    advice = suggest_renaming(missing, context.sample() or context.batch, context.model)
    if advice is not None or missing != "input_ids":
        return advice and f"{advice}."
    return (
        f"The batch has no input_ids (it has {', '.join(map(str, context.batch))}): tokenize the dataset first, such "
        "as dataset.map(lambda rows: tokenizer(rows['text'], truncation=True), batched=True)."
    )


def _advise_on_padding(context: ErrorContext) -> str | None:
    """Return advice for a sample that DataCollatorWithPadding cannot pad."""
    sample = context.sample()
    name = next((name for name in ("labels", *LABEL_NAMES) if sample.get(name) is not None), None)
    if name is None:
        return None
    if (text := find_text(sample[name])) is not None:
        return f"{TEXT_LABELS.format(name, text)}."
    if not isinstance(sample[name], (list, tuple)) or f"`{name}`" not in str(context.error):
        return None
    return (
        f"{name!r} is a list, which DataCollatorWithPadding does not pad: pass DataCollatorForTokenClassification or "
        "DataCollatorForSeq2Seq as data_collator."
    )


def _advise_on_untokenized(context: ErrorContext) -> str:
    columns = ", ".join(context.sample())
    text = next((name for name, value in context.sample().items() if find_text(value) is not None), "text")
    return (
        f"The dataset has {columns}, and no tokens: tokenize it first, such as "
        f"dataset.map(lambda rows: tokenizer(rows[{text!r}], truncation=True), batched=True)."
    )


def _advise_on_module_kind(context: ErrorContext) -> str | None:
    advice = advise_on_model_kind(context.model)
    return advice and f"{advice}."


def _advise_on_unknown_input(context: ErrorContext) -> str | None:
    name = re.search(r"forward\(\) got an unexpected keyword argument '(\w+)'", str(context.error))
    if name is None or not isinstance(context.batch, Mapping) or name.group(1) not in context.batch:
        return None
    return (
        f"The batch has {', '.join(map(str, context.batch))}, and the model is called with all of it: drop "
        f"{name.group(1)!r} from the dataset or in data_collator, set remove_unused_columns=True, or let forward "
        "take it."
    )


def _advise_on_no_gradient(context: ErrorContext) -> str | None:
    if not any(parameter.requires_grad for parameter in context.model.parameters()):
        return (
            f"No parameter of {type(context.model).__name__} is trained, since requires_grad is False for all of them: "
            "unfreeze some, or add an adapter."
        )
    return (
        "The loss does not depend on a parameter that is trained: look for detach(), .item() and torch.no_grad() in "
        "forward or compute_loss; for an adapter with gradient checkpointing, call model.enable_input_require_grads()."
    )


def _advise_on_memory(context: ErrorContext) -> str:
    if context.evaluates:
        return (
            f"Lower per_device_eval_batch_size ({context.args.per_device_eval_batch_size}), or keep less of each "
            "batch: eval_accumulation_steps=1 moves predictions to the host, preprocess_logits_for_metrics makes them "
            "smaller."
        )
    return (
        f"Lower per_device_train_batch_size ({context.args.per_device_train_batch_size}) and raise "
        "gradient_accumulation_steps by the same factor, which leaves the optimizer steps as they are; or set "
        "gradient_checkpointing=True, bf16=True or auto_find_batch_size=True."
    )


def _advise_on_pickling(context: ErrorContext) -> str | None:
    workers = context.args.dataloader_num_workers
    if not workers:
        return None
    return (
        f"dataloader_num_workers={workers} starts processes to which dataset and data_collator are sent, and what is "
        "defined within a function, or by lambda, cannot be: define it at the top of a module, or set "
        "dataloader_num_workers=0."
    )


# Torch's message on a loader process's exit -> advice; the last fits any other.
WORKER_EXIT_MESSAGES = {
    "killed by signal: Killed": "The system killed a loader process, usually because memory ran out: lower "
    "dataloader_num_workers ({workers}) or dataloader_prefetch_factor, or let the dataset keep less in memory.",
    "killed by signal: Bus error": "A loader process had no shared memory left, as in a container with a small "
    "/dev/shm: enlarge it (docker run --shm-size=8g), or lower dataloader_num_workers ({workers}).",
    "killed by signal: Terminated": "A loader process was ended by a signal from outside, as timeout, a scheduler or a "
    "person sends it.",
    "": "The dataset, the collator or a library of theirs ended a loader process: run once with "
    "dataloader_num_workers=0 (it is {workers}) to see where, and with python -X faulthandler if it crashed.",
}


def _advise_on_lost_loader_process(context: ErrorContext) -> str:
    message = f"{context.error} {context.error.__cause__}"
    text = next(text for part, text in WORKER_EXIT_MESSAGES.items() if part in message)
    return text.format(workers=context.args.dataloader_num_workers)


# Pattern of "type: message" -> advice, or a function that returns it.
RULES: list[tuple[str, Callable[[ErrorContext], str | None] | str]] = [
    ("index out of range in self", _advise_on_token_ids),
    ("index out of range in self|expanded size of the tensor|must match the size of tensor", _advise_on_sample_length),
    (r"Target -?\d+ is out of bounds", _advise_on_classes),
    ("Target size .* must be the same as input size|expected scalar type Long but found Float", _advise_on_label_type),
    (r"Expected input batch_size .* to match target batch_size", _advise_on_label_shape),
    ("exactly one of input_ids or inputs_embeds|have to specify (either )?input_ids", _advise_on_missing_input),
    (r"forward\(\) missing \d+ required positional argument", _advise_on_missing_input),
    ("got an unexpected keyword argument", _advise_on_unknown_input),
    ("Unable to create tensor, you should probably activate", _advise_on_padding),
    ("You should supply an encoding", _advise_on_untokenized),
    ('missing the required "forward" function', _advise_on_module_kind),
    ("does not require grad and does not have a grad_fn", _advise_on_no_gradient),
    ("OutOfMemoryError|CUDA out of memory|DefaultCPUAllocator: can't allocate", _advise_on_memory),
    (
        "Expected all tensors to be on the same device",
        "The batch and the parameters are on one device, so it is a tensor that the code makes itself: make it with "
        "device=x.device of an input, or register it in the model with register_buffer, which moves it too.",
    ),
    (
        "device-side assert",
        "It is mostly a label or a token id out of range. Run once with use_cpu=True: there the error names it.",
    ),
    ("Can't pickle|cannot pickle|Can't get local object|PicklingError", _advise_on_pickling),
    (r"DataLoader worker \(pid", _advise_on_lost_loader_process),
    (
        "Expected to have finished reduction in the prior iteration",
        "Some parameters got no gradient in the process that says so. Set ddp_find_unused_parameters=True (and leave "
        "ddp_static_graph unset), or freeze those parameters with requires_grad_(False).",
    ),
    (
        "Expected to mark a variable ready only once",
        "A parameter got its gradient twice in one backward pass. With activation_checkpointing=True set "
        "activation_checkpointing_kwargs={'use_reentrant': False} or ddp_find_unused_parameters=False; if the model "
        "runs several times for one loss, ddp_static_graph=True may help.",
    ),
]
