"""What to do about errors that torch or a model raises over a batch, found by looking at the batch and the model.

An error such as "index out of range in self" names neither the column nor the number. Each rule stands for the parts
of messages that it is about, and a look at what was there, which says nothing where it finds nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from littrainer.data.columns import renaming
from littrainer.model.facts import base_model


class Circumstances(NamedTuple):
    """What was there when an error came up.

    Parameters:
        error: the error.
        model: the Trainer's model, without what is wrapped around it.
        batch: the current batch, or None.
        args: the Trainer's arguments.
        evaluates: whether it came up in an evaluation or prediction.
        sample: gives the first sample of the data, or an empty one.
    """

    error: BaseException
    model: Any
    batch: Any
    args: Any
    evaluates: bool
    sample: Callable[[], Any]


def advice_for(
    error: BaseException, model: Any, batch: Any, args: Any, evaluates: bool, sample: Callable[[], Any] = dict
) -> list[str]:
    """Sentences that say what was wrong and what to do, if that is known; else none."""
    found = Circumstances(error, base_model(model), batch, args, evaluates, sample)
    matching = [look for sign, look in RULES if re.search(sign, f"{type(error).__name__}: {error}")]
    told = [look if isinstance(look, str) else look(found) for look in matching]
    return [sentence for sentence in told if sentence is not None]


def readable_range(value: Any) -> tuple[Any, Any] | None:
    """Least and greatest number of a tensor that can be read without asking a device, which may have failed."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.numel() or value.is_complex():
        return None
    least, greatest = value.aminmax() if value.dtype is not torch.bool else (value.min(), value.max())
    return least.item(), greatest.item()


def _entry(found: Circumstances, *names: str) -> tuple[str, torch.Tensor] | None:
    if isinstance(found.batch, Mapping):
        for name in names:
            if isinstance(found.batch.get(name), torch.Tensor):
                return name, found.batch[name]
    return None


def _token_ids(found: Circumstances) -> str | None:
    entry = _entry(found, "input_ids", "decoder_input_ids")
    limits = None if entry is None or entry[1].is_floating_point() else readable_range(entry[1])
    embedding = _input_embedding(found.model)
    if entry is None or limits is None or embedding is None:
        return None
    (name, _), (least, greatest), size = entry, limits, embedding
    if least < 0:
        return f"{name} has {least}: pad it with tokenizer.pad_token_id; only labels are padded with -100."
    if greatest >= size:
        return (
            f"{name} goes up to {greatest}, and {type(found.model).__name__} has {size} token embeddings, for 0 to "
            f"{size - 1}: take the tokenizer that belongs to the model, or call "
            "model.resize_token_embeddings(len(tokenizer)) where tokens were added."
        )
    return None


def _input_embedding(model: Any) -> int | None:
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _sample_length(found: Circumstances) -> str | None:
    entry = _entry(found, "input_ids", "inputs_embeds")
    config = getattr(found.model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if entry is None or entry[1].dim() < 2 or not isinstance(positions, int):
        return None
    if "roberta" in str(getattr(config, "model_type", "")):
        # Their positions begin behind the padding token's number.
        positions -= (getattr(config, "pad_token_id", None) or 0) + 1
    length = entry[1].shape[1]
    if length <= positions:
        return None
    return (
        f"The samples have {length} tokens, and {type(found.model).__name__} has {positions} positions: tokenize with "
        f"truncation=True and max_length={positions}."
    )


def _classes(found: Circumstances) -> str | None:
    entry = _entry(found, "labels", "label")
    limits = None if entry is None or entry[1].is_floating_point() else readable_range(entry[1])
    if entry is None or limits is None:
        return None
    (name, _), (least, greatest) = entry, limits
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


def _label_type(found: Circumstances) -> str | None:
    entry = _entry(found, "labels", "label")
    if entry is None or not entry[1].is_floating_point():
        return None
    kind = str(entry[1].dtype).removeprefix("torch.")
    return (
        f"{entry[0]} is {kind}, which a classification takes for several labels a sample: give whole "
        'numbers for one of several classes, a number for each class with problem_type="multi_label_classification", '
        "or load the model with num_labels=1 for a regression."
    )


def _label_shape(found: Circumstances) -> str | None:
    entry, ids = _entry(found, "labels", "label"), _entry(found, "input_ids")
    if entry is None or ids is None or "SequenceClassification" not in type(found.model).__name__:
        return None
    return (
        f"{entry[0]} has the shape {tuple(entry[1].shape)}, and {type(found.model).__name__} takes one number for each "
        f"of the {ids[1].shape[0]} samples: give each sample one label, or load the model of another task, such as "
        "AutoModelForTokenClassification for a label on each token."
    )


def _missing_input(found: Circumstances) -> str | None:
    name = re.search(r"positional arguments?: '(\w+)'", str(found.error))
    wanted = "input_ids" if name is None else name.group(1)
    if not isinstance(found.batch, Mapping) or wanted in found.batch:
        return None
    told = renaming(wanted, found.sample() or found.batch, found.model)
    if told is not None or wanted != "input_ids":
        return told and f"{told}."
    return (
        f"The batch has no input_ids (it has {', '.join(map(str, found.batch))}): tokenize the dataset first, such as "
        "dataset.map(lambda rows: tokenizer(rows['text'], truncation=True), batched=True)."
    )


def _unknown_input(found: Circumstances) -> str | None:
    name = re.search(r"forward\(\) got an unexpected keyword argument '(\w+)'", str(found.error))
    if name is None or not isinstance(found.batch, Mapping) or name.group(1) not in found.batch:
        return None
    return (
        f"The batch has {', '.join(map(str, found.batch))}, and the model is called with all of it: drop "
        f"{name.group(1)!r} from the dataset or in data_collator, set remove_unused_columns=True, or let forward "
        "take it."
    )


def _no_gradient(found: Circumstances) -> str | None:
    if not any(parameter.requires_grad for parameter in found.model.parameters()):
        return (
            f"No parameter of {type(found.model).__name__} is trained, since requires_grad is False for all of them: "
            "unfreeze some, or add an adapter."
        )
    return (
        "The loss does not depend on a parameter that is trained: look for detach(), .item() and torch.no_grad() in "
        "forward or compute_loss; for an adapter with gradient checkpointing, call model.enable_input_require_grads()."
    )


def _memory(found: Circumstances) -> str:
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


def _pickling(found: Circumstances) -> str | None:
    workers = found.args.dataloader_num_workers
    if not workers:
        return None
    return (
        f"dataloader_num_workers={workers} starts processes to which dataset and data_collator are sent, and what is "
        "defined within a function, or by lambda, cannot be: define it at the top of a module, or set "
        "dataloader_num_workers=0."
    )


# What torch says of how a loader process has ended -> what that means, and what to do.
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


def _lost_loader_process(found: Circumstances) -> str | None:
    # torch says how in the message, or in that of the error that it noticed the end by.
    said = f"{found.error} {found.error.__cause__}"
    end, words = next(
        (end, words) for sign, words in ENDS_OF_LOADER_PROCESSES.items() if (end := re.search(sign, said))
    )
    saving = " With enable_jit_checkpoint=True training saves a checkpoint on SIGTERM and stops."
    facts = end.groupdict() | {"saving": "" if found.args.enable_jit_checkpoint else saving}
    return words.format(workers=found.args.dataloader_num_workers, **facts)


# Parts of messages, with the type in front -> what to look at, or what there always is to say.
RULES: list[tuple[str, Callable[[Circumstances], str | None] | str]] = [
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
]
