"""The position in the training data, as the Trainer's and Lightning's checkpoints store it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# Sizes of data and optimizer step. A number of micro-batches means the same rows only if they are unchanged.
SIZES = {
    "micro_batch": "samples per micro-batch",
    "accumulation": "micro-batches per optimizer step",
    "world_size": "processes",
    "epoch_length": "micro-batches per epoch",
    "num_examples": "training samples",
}


@dataclass(frozen=True)
class LayoutChange:
    """The part of an epoch that was trained with other batches, optimizer steps or processes than the rest.

    Parameters:
        rows: rows trained before, for each of the `count_stream_shards`; empty if only the accumulation changed.
        batches: micro-batches of the new size that these rows count as.
        window: the micro-batch, counted from the epoch's beginning, at which the first optimizer step begins.
        share: share of the epoch that was trained before.
    """

    rows: list[int] = field(default_factory=list)
    batches: int = 0
    window: int = 0
    share: float = 0.0


@dataclass(frozen=True)
class DataPosition:
    """The position in the training data at which a process continues.

    Parameters:
        epoch: the epoch, counted from 0.
        micro_batches: micro-batches of the epoch that have been trained.
        epoch_end_is_due: the epoch is complete, and the work at its end is still to be done.
        data: what `DataProgress.state()` returned; None if only the number of micro-batches is known.
        sizes: values of `SIZES` for which `micro_batches` counts; None if unknown.
        random: states of all random number generators, in portable form; None leaves the generators alone.
        order_seed: seed that gives the order of each epoch; None if the order is drawn in another way.
        surplus_steps: optimizer steps taken in excess of the steps that today's sizes would have needed.
        description: the position in words, if the sizes have changed; else None.
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
    def load_fields(cls, saved: Mapping[str, Any]) -> DataPosition:
        """Return a position from a checkpoint; entries of other versions are left out."""
        return cls(**{part.name: saved[part.name] for part in fields(cls) if part.name in saved})

    def dump_fields(self, *names: str) -> dict[str, Any]:
        """Return these fields for a checkpoint."""
        return {name: getattr(self, name) for name in names}

    @property
    def layout_change(self) -> LayoutChange | None:
        """The epoch's part with another layout, if the training was resumed with one now or before."""
        change = (self.data or {}).get("layout_change")
        return None if change is None else LayoutChange(**change)

    @property
    def batches_to_skip(self) -> int:
        """Trained batches of the current layout."""
        return self.micro_batches - (0 if self.layout_change is None else self.layout_change.batches)


def find_changed_sizes(now: Mapping[str, Any], then: Mapping[str, Any], ignored: Collection[str]) -> list[str]:
    """Return the `SIZES` that are known now and then, and differ."""
    names = [name for name in SIZES if name not in ignored and None not in (now.get(name), then.get(name))]
    return [name for name in names if now[name] != then[name]]


def describe_sizes(now: Mapping[str, Any], then: Mapping[str, Any], names: Collection[str]) -> str:
    """Return changed sizes in words, with their earlier values in brackets."""
    return ", ".join(f"{now[name]} {SIZES[name]} ({then[name]})" for name in names)
