"""What `TrainerDataModule` keeps in a checkpoint, so that a resumed training reads on exactly where it stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from littrainer.checkpoint.lightning_format import DATA_VERSION
from littrainer.checkpoint.random_state import (
    capture_random_states,
    portable_states,
    set_random_states,
    states_of_portable,
)


@dataclass
class PlaceInData:
    """Where one process goes on reading.

    Parameters:
        epoch: the epoch, counted from 0.
        micro_batches: micro-batches of it whose optimizer steps are done.
        sizes: those of the data and of its batches, which have to be the same for the place to mean the same; None
            where they are not known.
        data: what `DataProgress.state()` returned; None where only the number of micro-batches is known.
        random: the states of all random generators, as `portable_states` has them; None leaves them alone.
        order_seed: with the epoch it makes the random order of an epoch; None where that is drawn in another way.
        random_when_read_ahead: where they stood before Lightning read the next window ahead; None where it has not.
    """

    epoch: int
    micro_batches: int
    sizes: dict[str, int | None] | None
    data: dict[str, Any] | None = None
    random: dict[str, Any] | None = None
    order_seed: int | None = None
    random_when_read_ahead: dict[str, Any] | None = None

    def restore_random_states(self) -> None:
        """Put the generators back where they stood."""
        _restore(self.random)

    def restore_for_reading(self) -> None:
        """Put the generators back where they stood when the next window was read."""
        _restore(self.random if self.random_when_read_ahead is None else self.random_when_read_ahead)


def state_of_places(places: list[PlaceInData]) -> dict[str, Any]:
    """The state that a checkpoint keeps, in tensors, numbers, texts and containers of them.

    Parameters:
        places: one of each process, by rank.
    """
    return {"version": DATA_VERSION, "processes": [dict(vars(place)) for place in places]}


def places_in(state: dict[str, Any]) -> list[PlaceInData]:
    """The places that `state_of_places` has stored.

    Raises:
        ValueError: the state is of another version, or none of a TrainerDataModule.
    """
    if state.get("version") != DATA_VERSION:
        raise ValueError(
            f"The state of the data has version {state.get('version')!r}, and this littrainer reads version "
            f"{DATA_VERSION}. Use the littrainer that wrote it, or resume without TrainerDataModule."
        )
    return [PlaceInData(**place) for place in state["processes"]]


def random_states() -> dict[str, Any]:
    """Where all random generators of this process stand, the current GPU's too."""
    return portable_states(capture_random_states())


def _restore(states: dict[str, Any] | None) -> None:
    if states is not None:
        set_random_states(states_of_portable(states))
