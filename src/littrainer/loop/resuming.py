"""The resume record: a file that transformers' checkpoints do not have, from which a training resumes exactly."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import IntervalStrategy
from littrainer.checkpoint.checksums import MANIFEST_NAME
from littrainer.checkpoint.layout import RESUME_RECORD_NAME, TRAINER_STATE_NAME, resume_record_name
from littrainer.checkpoint.reader import read_world_size
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.data.loaders import has_length
from littrainer.data.resume.position import DataPosition, LayoutChange, describe_sizes, find_changed_sizes
from littrainer.data.resume.progress import is_stateful
from littrainer.data.resume.skipping import (
    build_skipping_attributes,
    copy_with_attributes,
    count_stream_shards,
    global_batch_size,
)
from littrainer.data.stream_end import check_equal_lengths
from littrainer.runtime.lazy_isinstance import is_a

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState
    from littrainer.loop.plan import TrainingPlan

logger = logging.getLogger(__name__)

RECORD_VERSION = 1
POSITION_FIELDS = ("epoch", "micro_batches", "epoch_end_is_due")
INTERVALS = ("logging_steps", "eval_steps", "save_steps")
# Arguments that only change the length of a training.
LENGTHS = {"num_train_epochs", "max_steps"}
# Arguments for which a resumed training uses the checkpoint's values.
RESTORED_ARGUMENTS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", *INTERVALS)
# Arguments for which a resumed training uses the current values.
CURRENT_ARGUMENTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "optim"),
    *("ema_decay", "lr_scheduler_type", "warmup_steps", "max_grad_norm", "label_smoothing_factor"),
    *("neftune_noise_alpha", "seed", "data_seed", "train_sampling_strategy", "max_tokens_per_batch"),
    *("pack_to_length", "dataloader_drop_last", "dataloader_num_workers", "bf16", "fp16"),
)
COUNTED = (
    " The trained rows are unknown: training continues as if all optimizer steps had had the new size, so rows may be "
    "trained twice or left out."
)


@dataclass(frozen=True)
class TrainingSizes:
    """Arguments and sizes of a training, to record at a save or to compare at a resume.

    Parameters:
        state: at a save the current state, at a resume the checkpoint's.
        train_batch_size: samples in a micro-batch of this process.
        record: the checkpoint's `littrainer_resume.pt`, if any.
    """

    args: TrainingArguments
    state: TrainerState
    plan: TrainingPlan
    train_batch_size: int
    record: dict[str, Any] | None = None

    @cached_property
    def sizes(self) -> dict[str, Any]:
        args, plan, is_endless = self.args, self.plan, self.plan.is_endless
        return {
            "micro_batch": self.train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
            "world_size": args.world_size,
            "epoch_length": None if is_endless else plan.micro_batches_per_epoch,
            "num_examples": plan.num_examples,
            "tokens": args.max_tokens_per_batch or args.pack_to_length,
            "is_endless": is_endless,
        }

    @cached_property
    def changed(self) -> list[str]:
        """Names of the `SIZES` that differ from the record's, except lengths of streams."""
        ignored = ("epoch_length", "num_examples") if self.sizes["is_endless"] else ()
        return find_changed_sizes(self.sizes, (self.record or {}).get("sizes", {}), ignored)


def read_resume_record(folder: Path, rank: int = 0) -> dict[str, Any] | None:
    """Return the record of a checkpoint; None for a checkpoint of transformers.

    Parameters:
        rank: process whose position is read; `data` is None if the checkpoint has no such position.

    Raises:
        ValueError: a file is damaged, of another version, or could run code.
    """
    record = _load_record(folder / RESUME_RECORD_NAME)
    if record is None:
        return None
    # If the number of processes has changed, all resume from rank 0's data, since an epoch's order is the same in all.
    record["data_of_first"] = record["data"]
    if record.get("rank", 0) != rank:
        local = _load_record(folder / resume_record_name(rank)) if rank else None
        # Rank 0's record counts the rows of all processes.
        record["data"] = local and local["data"] and {**local["data"], "rows": record["data"].get("rows")}
    return record


def _load_record(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    record = load_tensors(path)
    version = record.get("version") if isinstance(record, dict) else None
    if not isinstance(record, dict) or version != RECORD_VERSION:
        raise ValueError(
            f"{path} has version {version!r}, and this littrainer reads version {RECORD_VERSION}. Use the littrainer "
            f"that wrote it, or delete it and {MANIFEST_NAME} to resume as transformers does."
        )
    return record


def find_position(training: TrainingSizes, loader: Any) -> DataPosition:
    """Return the record's position, adapted to the current sizes; if unknown, the position that transformers computes.

    With a record an epoch continues after the trained rows, even with other batch sizes or another number of processes.

    Raises:
        UnequalData: the remaining rows do not give all processes equally many batches.
    """
    default, record = compute_position_from_steps(training), training.record
    sizes, saved_sizes = training.sizes, (record or {}).get("sizes", {})
    # Older records have no "tokens".
    is_other_kind = (sizes["is_endless"], sizes["tokens"]) != (saved_sizes.get("is_endless"), saved_sizes.get("tokens"))
    if record is None or training.args.ignore_data_skip or is_other_kind:
        return default
    changed, data = set(training.changed), record["data"]
    position = DataPosition.load_fields({**record["position"], "data": data})
    if changed <= {"num_examples"}:
        return replace(position, surplus_steps=record.get("steps_ahead", 0))
    if "world_size" in changed:
        data = record["data_of_first"]
    # If the number of samples and another size have changed, the order may differ: the trained rows are unknown.
    if "num_examples" in changed or data is None:
        return default
    number = "the" if data.get("rows") is None else f"the {sum(data['rows'])}"
    description = f"after {number} rows of epoch {position.epoch} that were trained"
    moved: DataPosition | None
    if position.epoch_end_is_due or not (position.micro_batches or "layout_change" in data):
        names = ("generators", "order_seed", "order_is_kept")
        moved = replace(position, data={name: data[name] for name in names if name in data})
        description = f"at the first row of epoch {position.epoch + position.epoch_end_is_due}"
    # Micro-batches stay the same if only the accumulation has changed, unless a rebalancing sampler forms them from the
    # rows of each optimizer step.
    elif changed == {"accumulation"} and not is_a(getattr(loader, "batch_sampler", None), "rebalancing sampler"):
        change = replace(position.layout_change or LayoutChange(), window=position.micro_batches)
        moved = replace(position, data={**data, "layout_change": asdict(change)})
    else:
        moved = _move_by_rows(position, data, "world_size" in changed, training, loader)
    if moved is None:
        return default
    return replace(moved, surplus_steps=_count_surplus_steps(moved, training), description=description)


def _move_by_rows(
    position: DataPosition, data: Mapping[str, Any], has_other_processes: bool, training: TrainingSizes, loader: Any
) -> DataPosition | None:
    """Return the position after the trained rows, in batches of the current size; None if unknown."""
    plan, size, rows = training.plan, global_batch_size(loader), data.get("rows")
    length = plan.micro_batches_per_epoch
    # If a limit shortens the epoch, the rest of the loader is not the rest of the epoch.
    if rows is None or size is None or (has_length(loader) and len(loader) != length):
        return None
    parts, number = build_skipping_attributes(loader, rows), sum(rows)
    later = None if parts is None else copy_with_attributes(loader, parts)
    has_state = is_stateful(loader) and data.get("loader") is not None and not has_other_processes
    if later is None and not (has_state and data["num_workers"] == getattr(loader, "num_workers", 0)):
        return None
    if plan.is_endless:
        batches = min(number // size, training.state.global_step * training.args.gradient_accumulation_steps)
        share = batches / length
    else:
        check_equal_lengths(later, "rest of the epoch")
        remaining = math.ceil((plan.num_examples - number) / size) if later is None else len(later)
        batches, share = length - remaining, number / plan.num_examples
    names = ("epoch_start", "generators", "order", "stream", "loader", "num_workers")
    saved = {name: data.get(name) for name in names} | {"sharing": getattr(loader, "sharing", None)}
    saved["layout_change"] = asdict(LayoutChange(rows, batches, batches, share))
    return DataPosition(position.epoch, batches, batches == length, saved)


def _count_surplus_steps(position: DataPosition, training: TrainingSizes) -> int:
    plan = training.plan
    if plan.is_endless:
        return 0
    micro_batches = 0 if position.epoch_end_is_due else plan.micro_batches_per_epoch - position.micro_batches
    remaining_steps = math.ceil(micro_batches / training.args.gradient_accumulation_steps)
    return training.state.global_step + remaining_steps - (position.epoch + 1) * plan.optimizer_steps_per_epoch


def compute_position_from_steps(training: TrainingSizes) -> DataPosition:
    """Return the position that transformers computes from the optimizer steps."""
    args = training.args
    epoch, steps_into_epoch = divmod(training.state.global_step, training.plan.optimizer_steps_per_epoch)
    return DataPosition(epoch, 0 if args.ignore_data_skip else steps_into_epoch * args.gradient_accumulation_steps)


def has_work_at_epoch_ends(args: TrainingArguments) -> bool:
    return IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy, args.save_strategy)


def warn_of_differences(checkpoint: Path, training: TrainingSizes, position: DataPosition, loader: Any) -> None:
    sentences = _compare_data(checkpoint, training, position, loader)
    if arguments := _compare_arguments(training):
        lines = "\n\t".join(["", *arguments])
        sentences.append(
            "The following arguments do not match the ones in the checkpoint. Their current values are used, unless a "
            f"line says that the checkpoint's value is kept:{lines}"
        )
        if sentences[:-1] == [] and {line.partition(":")[0] for line in arguments} <= LENGTHS:
            logger.info("Resuming from %s with another length of the training:%s", checkpoint, lines)
            return
    if sentences:
        logger.warning("Resuming from %s, which was written by another training. %s", checkpoint, " ".join(sentences))


def _compare_arguments(training: TrainingSizes) -> list[str]:
    """Return a line for each argument that differs, in transformers' form."""
    current, state = get_compared_arguments(training.args), training.state
    saved = {} if training.record is None else training.record["arguments"]
    compared = {name: (current[name], saved[name], RESUME_RECORD_NAME) for name in current if name in saved}
    for name in INTERVALS:
        if current[name] is not None:
            interval = math.ceil(current[name] * training.plan.max_steps) if current[name] < 1 else current[name]
            compared[name] = interval, getattr(state, name), TRAINER_STATE_NAME
    if state.train_batch_size is not None:
        # Compared by the size in use, since a resume reuses the result of `auto_find_batch_size`.
        size = training.train_batch_size
        compared["per_device_train_batch_size"] = size, state.train_batch_size, TRAINER_STATE_NAME
    return [
        f"{name}: {current[name]} (from args) != {saved_value} (from {file})"
        + (", which is kept" if name in RESTORED_ARGUMENTS else "")
        for name, (value, saved_value, file) in compared.items()
        if value != saved_value
    ]


def _compare_data(checkpoint: Path, training: TrainingSizes, position: DataPosition, loader: Any) -> list[str]:
    args, record, sentences = training.args, training.record, []
    if record is not None and training.changed:
        steps = training.plan.add_surplus_steps(position.surplus_steps, args).max_steps
        where = f" Training continues {position.description}, and takes {steps} optimizer steps in all."
        if position.description is None:
            where = "" if position.data is not None or args.ignore_data_skip else COUNTED
        sentences.append(f"There are now {describe_sizes(training.sizes, record['sizes'], training.changed)}.{where}")
    rows, shards = ((record or {}).get("data") or {}).get("rows"), count_stream_shards(loader)
    if rows is not None and len(rows) != shards and not args.ignore_data_skip:
        sentences.append(
            f"The workers now read the stream in {shards} parts (before: {len(rows)}), so rows may be trained twice or "
            "left out: set dataloader_num_workers to what it was."
        )
    processes = read_world_size(checkpoint) if record is None else record["sizes"]["world_size"]
    if processes != (now := training.sizes["world_size"]):
        numbers = f"There are now {now} processes (before: {processes}). " if record is None else ""
        sentences.append(
            f"{numbers}Random numbers start from the seed, since the checkpoint's states are those of another "
            "number of processes."
        )
    return sentences


def get_compared_arguments(args: TrainingArguments) -> dict[str, Any]:
    compared = {}
    for name in (*CURRENT_ARGUMENTS, *RESTORED_ARGUMENTS):
        value = getattr(args, name)
        value = value.value if isinstance(value, Enum) else value
        compared[name] = value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
    return compared
