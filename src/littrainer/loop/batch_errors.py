"""Notes below an error: the batch for which it was raised, and advice from one table of messages.

An error such as "index out of range in self" names neither the column nor the number. A rule has a pattern of messages,
and a sentence or a function that looks at batch and model and returns a sentence, or None if it finds nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from littrainer.data.columns import read_first_sample, suggest_renaming
from littrainer.data.workers import MAX_NAMED, READING
from littrainer.model.facts import base_model
from littrainer.runtime.nested_values import describe
from littrainer.runtime.notes import add_note

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState
    from littrainer.evaluation.loop import EvaluationLoop


def note_batch(error: Exception, trainer: Any, doing: str, batch: Any, evaluates: bool = False) -> None:
    """Add notes to an error without any: the batch, if there was one, and advice.

    Parameters:
        doing: half a sentence on the work during which the error was raised.
    """
    # An error class of littrainer, such as the class for a failure in another process, is not about this batch.
    if getattr(error, "__notes__", None) or type(error).__module__.startswith("littrainer."):
        return
    # A fault here must not replace the error.
    with suppress(Exception):
        state = trainer.state if trainer.is_in_train else None
        add_note(error, f"It came up {doing}{_when(trainer.args, state, evaluates)}{_describe_batch(batch)}.")
        sample = partial(read_first_sample, trainer, evaluates)
        for sentence in advise(ErrorContext(error, base_model(trainer.model), batch, trainer.args, evaluates, sample)):
            add_note(error, sentence)


@contextmanager
def note_reading_errors(trainer: Any, evaluation: EvaluationLoop | None = None) -> Iterator[None]:
    """A block in which data is read: an error that reading raises names the samples in a note.

    Parameters:
        evaluation: the loop that runs in the block; errors with one of its batches get a note too.
    """
    try:
        yield
    except Exception as error:
        if hasattr(error, READING):
            note_batch(error, trainer, getattr(error, READING), None, evaluation is not None)
        elif evaluation is not None and evaluation.batch is not None:
            note_batch(error, trainer, "with a batch", evaluation.batch, evaluates=True)
        raise


def _when(args: TrainingArguments, state: TrainerState | None, evaluates: bool) -> str:
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
    of_numbers = ""
    if limits is not None:
        least, greatest = (f"{number:.4g}" if isinstance(number, float) else str(number) for number in limits)
        of_numbers = f", all {least}" if least == greatest else f" from {least} to {greatest}"
    return f"{describe(value)}{of_numbers}"


# ---- Advice ----------------------------------------------------------------------------------------------------------


class ErrorContext(NamedTuple):
    """An error and its circumstances; `sample` returns the first sample of the data, or an empty one."""

    error: BaseException
    # Unwrapped.
    model: Any
    batch: Any
    args: TrainingArguments
    evaluates: bool
    sample: Callable[[], Any] = dict


def advise(found: ErrorContext) -> list[str]:
    """Return sentences on the reason of an error and what to do."""
    text = f"{type(found.error).__name__}: {found.error}"
    advice = [rule if isinstance(rule, str) else rule(found) for sign, rule in RULES if re.search(sign, text)]
    return [sentence for sentence in advice if sentence is not None]


def _find_range(value: Any) -> tuple[Any, Any] | None:
    """Return the least and greatest number of a tensor on the host; a device may have failed."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.numel() or value.is_complex():
        return None
    least, greatest = value.aminmax() if value.dtype is not torch.bool else (value.min(), value.max())
    return least.item(), greatest.item()


def _entry(found: ErrorContext, *names: str) -> tuple[str, torch.Tensor] | None:
    if isinstance(found.batch, Mapping):
        for name in names:
            if isinstance(found.batch.get(name), torch.Tensor):
                return name, found.batch[name]
    return None


def _whole_numbers(found: ErrorContext, *names: str) -> tuple[str, int, int] | None:
    """Return the first of some entries, with its least and greatest number; None if these cannot be read."""
    entry = _entry(found, *names)
    limits = None if entry is None or entry[1].is_floating_point() else _find_range(entry[1])
    return None if entry is None or limits is None else (entry[0], *limits)


def _token_ids(found: ErrorContext) -> str | None:
    numbers = _whole_numbers(found, "input_ids", "decoder_input_ids")
    try:
        size = int(found.model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError, TypeError):
        return None
    if numbers is None:
        return None
    name, least, greatest = numbers
    if least < 0:
        return f"{name} has {least}: pad it with tokenizer.pad_token_id; only labels are padded with -100."
    if greatest >= size:
        return (
            f"{name} goes up to {greatest}, and {type(found.model).__name__} has {size} token embeddings, for 0 to "
            f"{size - 1}: take the tokenizer that belongs to the model, or call "
            "model.resize_token_embeddings(len(tokenizer)) where tokens were added."
        )
    return None


def _sample_length(found: ErrorContext) -> str | None:
    entry = _entry(found, "input_ids", "inputs_embeds")
    config = getattr(found.model, "config", None)
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
        f"The samples have {length} tokens, and {type(found.model).__name__} has {positions} positions: tokenize with "
        f"truncation=True and max_length={positions}."
    )


def _classes(found: ErrorContext) -> str | None:
    numbers = _whole_numbers(found, "labels", "label")
    if numbers is None:
        return None
    name, least, greatest = numbers
    classes = getattr(getattr(found.model, "config", None), "num_labels", None)
    if "Classification" not in type(found.model).__name__ or not isinstance(classes, int):
        return f"{name} has numbers from {least} to {greatest}; they have to be from 0 to the number of classes less 1."
    if least >= 0 and greatest < classes:
        return None
    mended = "" if least < 0 else f"load it with num_labels={greatest + 1} or more, or "
    return (
        f"{name} has numbers from {least} to {greatest}, and {type(found.model).__name__} has {classes} classes "
        f"(config.num_labels), for 0 to {classes - 1}: {mended}number the labels from 0; -100 stands for a label to "
        "leave out."
    )


def _label_type(found: ErrorContext) -> str | None:
    entry = _entry(found, "labels", "label")
    if entry is None or not entry[1].is_floating_point():
        return None
    kind = str(entry[1].dtype).removeprefix("torch.")
    return (
        f"{entry[0]} is {kind}, which a classification takes for several labels a sample: give whole "
        'numbers for one of several classes, a number for each class with problem_type="multi_label_classification", '
        "or load the model with num_labels=1 for a regression."
    )


def _label_shape(found: ErrorContext) -> str | None:
    entry, ids = _entry(found, "labels", "label"), _entry(found, "input_ids")
    if entry is None or ids is None or "SequenceClassification" not in type(found.model).__name__:
        return None
    return (
        f"{entry[0]} has the shape {tuple(entry[1].shape)}, and {type(found.model).__name__} takes one number for each "
        f"of the {ids[1].shape[0]} samples: give each sample one label, or load the model of another task, such as "
        "AutoModelForTokenClassification for a label on each token."
    )


def _missing_input(found: ErrorContext) -> str | None:
    name = re.search(r"positional arguments?: '(\w+)'", str(found.error))
    wanted = "input_ids" if name is None else name.group(1)
    if not isinstance(found.batch, Mapping) or wanted in found.batch:
        return None
    advice = suggest_renaming(wanted, found.sample() or found.batch, found.model)
    if advice is not None or wanted != "input_ids":
        return advice and f"{advice}."
    return (
        f"The batch has no input_ids (it has {', '.join(map(str, found.batch))}): tokenize the dataset first, such as "
        "dataset.map(lambda rows: tokenizer(rows['text'], truncation=True), batched=True)."
    )


def _unknown_input(found: ErrorContext) -> str | None:
    name = re.search(r"forward\(\) got an unexpected keyword argument '(\w+)'", str(found.error))
    if name is None or not isinstance(found.batch, Mapping) or name.group(1) not in found.batch:
        return None
    return (
        f"The batch has {', '.join(map(str, found.batch))}, and the model is called with all of it: drop "
        f"{name.group(1)!r} from the dataset or in data_collator, set remove_unused_columns=True, or let forward "
        "take it."
    )


def _no_gradient(found: ErrorContext) -> str | None:
    if not any(parameter.requires_grad for parameter in found.model.parameters()):
        return (
            f"No parameter of {type(found.model).__name__} is trained, since requires_grad is False for all of them: "
            "unfreeze some, or add an adapter."
        )
    return (
        "The loss does not depend on a parameter that is trained: look for detach(), .item() and torch.no_grad() in "
        "forward or compute_loss; for an adapter with gradient checkpointing, call model.enable_input_require_grads()."
    )


def _memory(found: ErrorContext) -> str:
    if found.evaluates:
        return (
            f"Lower per_device_eval_batch_size ({found.args.per_device_eval_batch_size}), or keep less of each batch: "
            "eval_accumulation_steps=1 moves predictions to the host, preprocess_logits_for_metrics makes them smaller."
        )
    return (
        f"Lower per_device_train_batch_size ({found.args.per_device_train_batch_size}) and raise "
        "gradient_accumulation_steps by the same factor, which leaves the optimizer steps as they are; or set "
        "gradient_checkpointing=True, bf16=True or auto_find_batch_size=True."
    )


def _pickling(found: ErrorContext) -> str | None:
    workers = found.args.dataloader_num_workers
    if not workers:
        return None
    return (
        f"dataloader_num_workers={workers} starts processes to which dataset and data_collator are sent, and what is "
        "defined within a function, or by lambda, cannot be: define it at the top of a module, or set "
        "dataloader_num_workers=0."
    )


# Torch's message on the end of a loader process -> the reason and the advice.
ENDS_OF_LOADER_PROCESSES = {
    "killed by signal: Killed": "The system killed a loader process, usually because memory ran out: lower "
    "dataloader_num_workers ({workers}) or dataloader_prefetch_factor, or let the dataset keep less in memory.",
    "killed by signal: Bus error": "A loader process had no shared memory left, as in a container with a small "
    "/dev/shm: enlarge it (docker run --shm-size=8g), or lower dataloader_num_workers ({workers}).",
    "killed by signal: (?P<how>(Segm|Abort|Floating|Illegal)[a-z ]*)": "A library that the dataset or the collator "
    "calls crashed in a loader process ({how}): python -X faulthandler, with dataloader_num_workers=0, shows where.",
    "killed by signal: (?P<how>[^.]*)": "A loader process was ended by a signal from outside ({how}), as timeout, a "
    "scheduler or a person sends it.{saving}",
    "exit code (?P<how>\\d+)": "The dataset, the collator or a library of theirs ended a loader process with status "
    "{how}, as os._exit() and sys.exit() do: run once with dataloader_num_workers=0 (it is {workers}) to see where.",
    "": "A loader process ended without an error, as by os._exit(0) in the dataset, the collator or a library of "
    "theirs: run once with dataloader_num_workers=0 (it is {workers}) to see where.",
}


def _lost_loader_process(found: ErrorContext) -> str | None:
    # The end is in the message, or in that of the cause.
    said = f"{found.error} {found.error.__cause__}"
    end, words = next(
        (end, words) for sign, words in ENDS_OF_LOADER_PROCESSES.items() if (end := re.search(sign, said))
    )
    saving = " With enable_jit_checkpoint=True training saves a checkpoint on SIGTERM and stops."
    facts = end.groupdict() | {"saving": "" if found.args.enable_jit_checkpoint else saving}
    return words.format(workers=found.args.dataloader_num_workers, **facts)


# Pattern of messages, which begin with the type -> the advice, or a function that looks for it.
RULES: list[tuple[str, Callable[[ErrorContext], str | None] | str]] = [
    ("index out of range in self", _token_ids),
    ("index out of range in self|expanded size of the tensor|must match the size of tensor", _sample_length),
    (r"Target -?\d+ is out of bounds", _classes),
    ("Target size .* must be the same as input size|expected scalar type Long but found Float", _label_type),
    (r"Expected input batch_size .* to match target batch_size", _label_shape),
    ("exactly one of input_ids or inputs_embeds|have to specify (either )?input_ids", _missing_input),
    (r"forward\(\) missing \d+ required positional argument", _missing_input),
    ("got an unexpected keyword argument", _unknown_input),
    ("does not require grad and does not have a grad_fn", _no_gradient),
    ("OutOfMemoryError|CUDA out of memory|DefaultCPUAllocator: can't allocate", _memory),
    (
        "Expected all tensors to be on the same device",
        "The batch and the parameters are on one device, so it is a tensor that the code makes itself: make it with "
        "device=x.device of an input, or register it in the model with register_buffer, which moves it too.",
    ),
    (
        "device-side assert",
        "It is mostly a label or a token id out of range. Run once with use_cpu=True: there the error names it.",
    ),
    ("Can't pickle|cannot pickle|Can't get local object|PicklingError", _pickling),
    (r"DataLoader worker \(pid", _lost_loader_process),
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
