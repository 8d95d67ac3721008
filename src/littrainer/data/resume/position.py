"""The position in the training data, as the Trainer's and Lightning's checkpoints store it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# Sizes that must be unchanged for a number of micro-batches to mean the same rows.
SIZES = {
    "micro_batch": "samples per micro-batch",
    "accumulation": "micro-batches per optimizer step",
    "world_size": "processes",
    "epoch_length": "micro-batches per epoch",
    "num_examples": "training samples",
}


@dataclass(frozen=True)
class LayoutChange:
    """Part of an epoch that was trained with another layout: batch size, accumulation and number of processes.

    Parameters:
        rows: number of rows trained before the change, by stream shard; empty if only the accumulation changed.
        batches: number of micro-batches of the new size as which these rows are counted.
        window: index in the epoch of the micro-batch that begins the first optimizer step after the change.
        share: fraction of the epoch trained before the change.
    """

    rows: list[int] = field(default_factory=list)
    batches: int = 0
    window: int = 0
    share: float = 0.0


@dataclass(frozen=True)
class DataPosition:
    """Position in the training data at which a process resumes.

    Parameters:
        micro_batches: trained micro-batches of the epoch.
        epoch_end_is_due: all batches of the epoch are trained, but its end is not yet handled.
        data: result of `DataProgress.state()`; None if only the number of micro-batches is known.
        sizes: `SIZES` under which `micro_batches` was counted; only littrainer.lightning sets `sizes`, `random` and
            `order_seed`.
        random: encoded states of all random number generators; None leaves the generators alone.
        order_seed: seed of the order of each epoch.
        surplus_steps: difference between the optimizer steps taken before the resume and those that the current batch
            sizes would have taken for the same rows; negative if fewer were taken.
        description: where training continues, for a warning; None if the position was not adapted to other sizes.
    """

    epoch: int
    micro_batches: int = 0
    epoch_end_is_due: bool = False
    data: dict[str, Any] | None = None
    sizes: Mapping[str, Any] | None = None
    random: dict[str, Any] | None = None
    order_seed: int | None = None
    surplus_steps: int = 0
    description: str | None = None

    @classmethod
    def load_fields(cls, record: Mapping[str, Any]) -> DataPosition:
        """Return the position of a record, without entries of other releases."""
        return cls(**{entry.name: record[entry.name] for entry in fields(cls) if entry.name in record})

    def dump_fields(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    @property
    def layout_change(self) -> LayoutChange | None:
        change = (self.data or {}).get("layout_change")
        return None if change is None else LayoutChange(**change)

    @property
    def batches_to_skip(self) -> int:
        """Micro-batches to skip after the rows that were trained with another layout."""
        return self.micro_batches - (0 if self.layout_change is None else self.layout_change.batches)


def find_changed_sizes(now: Mapping[str, Any], then: Mapping[str, Any], ignored: Collection[str]) -> list[str]:
    """Return the names of the sizes that differ; a size of None is unknown, and equals every size."""
    pairs = {name: (now.get(name), then.get(name)) for name in SIZES if name not in ignored}
    return [name for name, (size, saved) in pairs.items() if None not in (size, saved) and size != saved]


def describe_sizes(now: Mapping[str, Any], then: Mapping[str, Any], names: Collection[str]) -> str:
    """Return a text of changed sizes, with their earlier values in brackets."""
    return ", ".join(f"{now[name]} {SIZES[name]} (before: {then[name]})" for name in names)
