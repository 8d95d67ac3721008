"""What a checkpoint keeps so that training goes on exactly, besides what transformers' checkpoints keep.

It is one file, which transformers passes over. A checkpoint without it is resumed as transformers resumes it: at the
place in the data that the number of optimizer steps stands for. With it, an epoch that was begun with other batches,
optimizer steps or processes goes on behind the rows that were trained.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from littrainer.arguments.choices import IntervalStrategy
from littrainer.callbacks.lightning_states import additions_of_lightning_callbacks, states_of_lightning_callbacks
from littrainer.checkpoint.checksums import MANIFEST_NAME
from littrainer.checkpoint.layout import RESUME_RECORD_NAME, TRAINER_STATE_NAME, resume_record_name
from littrainer.checkpoint.reader import processes_that_wrote
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.data.loaders import has_length
from littrainer.data.position import (
    LayoutChange,
    keeps_its_state,
    parts_read,
    rows_of_round,
    without_first_rows,
)
from littrainer.data.stream_end import check_equal_lengths
from littrainer.errors.lazy_isinstance import is_a

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState
    from littrainer.training.plan import TrainingPlan
    from littrainer.training.run import TrainingRun

logger = logging.getLogger(__name__)

RECORD_VERSION = 1
INTERVALS = ("logging_steps", "eval_steps", "save_steps")
# What a resumed training reads from the checkpoint, whatever the arguments say now.
KEPT_FROM_CHECKPOINT = (
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    *INTERVALS,
)
# What makes another training of it, from the resumed step on.
TAKEN_FROM_ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "optim",
    "ema_decay",
    "lr_scheduler_type",
    "warmup_steps",
    "max_grad_norm",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "seed",
    "data_seed",
    "train_sampling_strategy",
    "max_tokens_per_batch",
    "pack_to_length",
    "dataloader_drop_last",
    "dataloader_num_workers",
    "bf16",
    "fp16",
)
# Sizes of the data and of the optimizer step. If they are the same, a place in the data is one in micro-batches.
SIZES = {
    "micro_batch": "samples per micro-batch",
    "accumulation": "micro-batches per optimizer step",
    "world_size": "processes",
    "epoch_length": "micro-batches per epoch",
    "num_examples": "training samples",
}


@dataclass
class Position:
    """The place in the data at which training goes on.

    Parameters:
        epoch: the epoch, counted from 0.
        micro_batches: micro-batches of it that have been trained on.
        epoch_end_is_due: all of the epoch has been trained on, and what is done at its end is still to be done.
    """

    epoch: int
    micro_batches: int
    epoch_end_is_due: bool = False


COUNTED = (
    " Which rows were trained is not known of these batches. Counted in optimizer steps of the new size, rows may be "
    "trained twice or left out."
)


class ResumedPlace(NamedTuple):
    """Where a training goes on, in micro-batches of today's size, and what reading on from there needs.

    Parameters:
        kept: what `DataProgress.state()` returned, as far as it means something; None if nothing is known.
        steps_ahead: as for `TrainingPlan.behind`.
        words: where that is, if the sizes are others than they were; else None.
    """

    position: Position
    kept: dict[str, Any] | None = None
    steps_ahead: int = 0
    words: str | None = None


class ResumedTraining(NamedTuple):
    """What a checkpoint is compared with: the training that resumes from it.

    Parameters:
        args: its arguments.
        state: the checkpoint's, which it goes on with.
        plan: its length.
        train_batch_size: samples in a micro-batch of this process.
    """

    args: TrainingArguments
    state: TrainerState
    plan: TrainingPlan
    train_batch_size: int

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of data and optimizer step, under the names of `SIZES`."""
        return sizes_of(self.args, self.train_batch_size, self.plan)


def resume_record(run: TrainingRun) -> dict[str, Any]:
    """What `littrainer_resume.pt` holds for the step that a training stands at."""
    position = run.position()
    if run.resumed_at is not None:
        # No epoch has begun since: the data stands where it stood.
        data = (run.record or {}).get("data")
    else:
        is_over = position.epoch_end_is_due or not position.micro_batches
        data = run.windows.progress.state(position.micro_batches, epoch_is_over=is_over)
    return {
        "version": RECORD_VERSION,
        "position": vars(position),
        "sizes": sizes_of(run.trainer.args, run.trainer.session.train_batch_size, run.plan),
        "arguments": compared_arguments(run.trainer.args),
        "rank": run.trainer.args.process_index,
        "data": data,
        "steps_ahead": run.steps_ahead,
        "lightning_callbacks": states_of_lightning_callbacks(run.trainer.lightning_module),
        "schedule_is_replaced": run.trainer.schedule_is_replaced,
        **run.step.health.record(),
        **({} if run.step.fitting is None else {"fitting_elements": run.step.fitting.fitting}),
        "lightning_additions": additions_of_lightning_callbacks(
            run.trainer.lightning_module, run.trainer.state.global_step
        ),
    }


def read_resume_record(folder: Path, rank: int = 0) -> dict[str, Any] | None:
    """The record of a checkpoint; None where transformers wrote it.

    Parameters:
        rank: the process whose place in the data is read; of one that the checkpoint knows nothing of it is None.

    Raises:
        ValueError: a file is damaged, of another version, or could run code.
    """
    record = _read(folder, RESUME_RECORD_NAME)
    if record is not None:
        # The order of an epoch is that of all processes.
        record["data_of_first"] = record["data"]
    if record is not None and record.get("rank", 0) != rank:
        own = _read(folder, resume_record_name(rank)) if rank else None
        # Rows are counted where they are read.
        record["data"] = own and own["data"] and {**own["data"], "rows": record["data"].get("rows")}
    return record


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / name
    if not path.is_file():
        return None
    record = load_tensors(path)
    version = record.get("version") if isinstance(record, dict) else None
    if version != RECORD_VERSION:
        raise ValueError(
            f"{path} has version {version!r}, and this littrainer reads version {RECORD_VERSION}. Use the littrainer "
            f"that wrote it, or delete it and {MANIFEST_NAME} to resume as transformers does."
        )
    assert isinstance(record, dict)
    return record


def place_to_resume(record: dict[str, Any] | None, training: ResumedTraining, loader: Any) -> ResumedPlace:
    """Return where a training goes on: where the record says, or as transformers counts it.

    Parameters:
        record: what `read_resume_record` returned.
        loader: the training DataLoader.

    Raises:
        UnequalData: with today's batches the rows that are left do not give all processes equally many.
    """
    counted = ResumedPlace(counted_position(training))
    if record is None or training.args.ignore_data_skip:
        return counted
    now, then = training.sizes, record["sizes"]
    if now["is_endless"] != then["is_endless"]:
        return counted
    # A stream's length is that of the training, and where it stands does not depend on it.
    of_stream = {"epoch_length", "num_examples"} if now["is_endless"] else set()
    changed = {name for name in SIZES if now[name] != then[name]} - of_stream
    position, data = Position(**record["position"]), record["data"]
    # Checkpoints from before there was a limit of tokens have none.
    if now["tokens"] != then.get("tokens"):
        return counted
    if changed <= {"num_examples"}:
        return ResumedPlace(position, data, record.get("steps_ahead", 0))
    if "world_size" in changed:
        data = record["data_of_first"]
    if "num_examples" in changed or data is None:
        return counted
    if position.epoch_end_is_due or not (position.micro_batches or "layout_change" in data):
        kept = {name: data[name] for name in ("generators", "order_seed", "order_is_kept") if name in data}
        epoch = position.epoch + position.epoch_end_is_due
        place: ResumedPlace | None = ResumedPlace(position, kept, words=f"at the first row of epoch {epoch}")
    elif changed == {"accumulation"} and not is_a(getattr(loader, "batch_sampler", None), "rebalancing sampler"):
        change = LayoutChange(**data.get("layout_change", asdict(LayoutChange([], 0, 0, 0.0))))
        kept = {**data, "layout_change": {**asdict(change), "window": position.micro_batches}}
        place = ResumedPlace(position, kept)
    else:
        place = _behind_rows(position, data, "world_size" in changed, training, loader)
    if place is None:
        return counted
    number = "the" if data.get("rows") is None else f"the {sum(data['rows'])}"
    words = place.words or f"behind {number} rows of epoch {position.epoch} that were trained"
    return place._replace(steps_ahead=_steps_ahead(place.position, training), words=words)


def _behind_rows(
    position: Position, data: Mapping[str, Any], are_other_processes: bool, training: ResumedTraining, loader: Any
) -> ResumedPlace | None:
    plan, size, rows = training.plan, rows_of_round(loader), data.get("rows")
    length = plan.micro_batches_per_epoch
    # Lightning's limits may leave batches out.
    if rows is None or size is None or (has_length(loader) and len(loader) != length):
        return None
    later, number = without_first_rows(loader, rows), sum(rows)
    reads_on = keeps_its_state(loader) and data.get("loader") is not None and not are_other_processes
    if later is None and not (reads_on and data["num_workers"] == getattr(loader, "num_workers", 0)):
        return None
    if plan.is_endless:
        batches = min(number // size, training.state.global_step * training.args.gradient_accumulation_steps)
        share = batches / length
    else:
        check_equal_lengths(later, "rest of the epoch")
        left = math.ceil((plan.num_examples - number) / size) if later is None else len(later)
        batches, share = length - left, number / plan.num_examples
    names = ("epoch_start", "generators", "order", "stream", "loader", "num_workers")
    kept = {name: data.get(name) for name in names} | {"sharing": getattr(loader, "sharing", None)}
    kept["layout_change"] = asdict(LayoutChange(rows, batches, batches, share))
    return ResumedPlace(Position(position.epoch, batches, batches == length), kept)


def _steps_ahead(position: Position, training: ResumedTraining) -> int:
    plan = training.plan
    if plan.is_endless:
        return 0
    left = 0 if position.epoch_end_is_due else plan.micro_batches_per_epoch - position.micro_batches
    steps_left = math.ceil(left / training.args.gradient_accumulation_steps)
    return training.state.global_step + steps_left - (position.epoch + 1) * plan.optimizer_steps_per_epoch


def counted_position(training: ResumedTraining) -> Position:
    """The place in the data that the number of optimizer steps stands for, as transformers counts it."""
    args = training.args
    epoch, steps_into_epoch = divmod(training.state.global_step, training.plan.optimizer_steps_per_epoch)
    return Position(epoch, 0 if args.ignore_data_skip else steps_into_epoch * args.gradient_accumulation_steps)


def has_work_at_epoch_ends(args: TrainingArguments) -> bool:
    """Whether the arguments ask for something at the end of each epoch."""
    return IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy, args.save_strategy)


def warn_of_differences(
    checkpoint: Path, record: dict[str, Any] | None, training: ResumedTraining, place: ResumedPlace, loader: Any
) -> None:
    """Say once what is not as it was when a checkpoint was written."""
    sentences = _other_sizes(record, training, place) + _other_parts(record, training, loader)
    sentences += _other_processes(checkpoint, record is not None, training.args)
    if arguments := _other_arguments(record, training):
        lines = "".join(f"\n\t{line}" for line in arguments)
        sentences.append(
            f"The following arguments do not match the ones in the checkpoint, and count unless its own is kept:{lines}"
        )
    if sentences:
        logger.warning("Resuming from %s, which was written by another training. %s", checkpoint, " ".join(sentences))


def _other_arguments(record: dict[str, Any] | None, training: ResumedTraining) -> list[str]:
    """A line for each argument that differs, in the words that scripts look for."""
    now, state = compared_arguments(training.args), training.state
    then = {} if record is None else record["arguments"]
    # What it is now, what it was, and the file that says so.
    compared = {name: (now[name], then[name], RESUME_RECORD_NAME) for name in now if name in then}
    for name in INTERVALS:
        if now[name] is not None:
            interval = math.ceil(now[name] * training.plan.max_steps) if now[name] < 1 else now[name]
            compared[name] = interval, getattr(state, name), TRAINER_STATE_NAME
    if state.train_batch_size is not None:
        # A search for it goes on with the one that was found before.
        size = training.train_batch_size
        compared["per_device_train_batch_size"] = size, state.train_batch_size, TRAINER_STATE_NAME
    return [
        f"{name}: {now[name]} (from args) != {before} (from {place})"
        + (", which is kept" if name in KEPT_FROM_CHECKPOINT else "")
        for name, (current, before, place) in compared.items()
        if current != before
    ]


def _other_sizes(record: dict[str, Any] | None, training: ResumedTraining, place: ResumedPlace) -> list[str]:
    if record is None:
        return []
    now, then = training.sizes, record["sizes"]
    names = [name for name in SIZES if not now["is_endless"] or name not in ("epoch_length", "num_examples")]
    changed = [f"{now[name]} {SIZES[name]} ({then[name]})" for name in names if now[name] != then[name]]
    if not changed:
        return []
    steps = training.plan.behind(place.steps_ahead, training.args).max_steps
    where = f" Training goes on {place.words}, and takes {steps} optimizer steps in all."
    if place.words is None:
        where = "" if place.kept is not None or training.args.ignore_data_skip else COUNTED
    return [f"There are now {', '.join(changed)}.{where}"]


def _other_parts(record: dict[str, Any] | None, training: ResumedTraining, loader: Any) -> list[str]:
    rows, parts = ((record or {}).get("data") or {}).get("rows"), parts_read(loader)
    if rows is None or len(rows) == parts or training.args.ignore_data_skip:
        return []
    named = f"The workers read the stream in {parts} parts ({len(rows)})"
    return [f"{named}, so rows may be trained twice or left out: set dataloader_num_workers to what it was."]


def _other_processes(checkpoint: Path, sizes_are_named: bool, args: TrainingArguments) -> list[str]:
    then = processes_that_wrote(checkpoint)
    if then == args.world_size:
        return []
    numbers = "" if sizes_are_named else f"There are now {args.world_size} processes ({then}). "
    return [f"{numbers}Random numbers go on from the seed, since each process has its own."]


def sizes_of(args: TrainingArguments, train_batch_size: int, plan: TrainingPlan) -> dict[str, Any]:
    """Return the sizes of a training's data and optimizer step, under the names of `SIZES`."""
    return {
        "micro_batch": train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        "world_size": args.world_size,
        "epoch_length": plan.micro_batches_per_epoch,
        "num_examples": plan.num_examples,
        "tokens": args.max_tokens_per_batch or args.pack_to_length,
        "is_endless": plan.is_endless,
    }


def compared_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that a resumed training compares with its own, as plain values."""
    values = {name: getattr(args, name) for name in (*TAKEN_FROM_ARGUMENTS, *KEPT_FROM_CHECKPOINT)}
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
    return {
        name: value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in plain.items()
    }
