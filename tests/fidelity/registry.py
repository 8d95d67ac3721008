"""The table of scenarios: name, function, and what its record holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.fidelity.record import EVERY_SCENARIO, WITH_CHECKPOINTS

if TYPE_CHECKING:
    from tests.fidelity.record import Record
    from tests.fidelity.side import Side

Script = Callable[["Side"], "Record"]


@dataclass(frozen=True)
class Scenario:
    """A training script that both sides run.

    Parameters:
        name: The function's name; it is the test's id.
        run: The script. It takes its names from the side that is handed to it.
        saves: Whether it leaves checkpoints, so that their content is compared.
        predicts: Whether it hands over predictions.
        extra: Whether it returns further values.
        processes: Processes it is for.
    """

    name: str
    run: Script
    saves: bool = False
    predicts: bool = False
    extra: bool = False
    processes: int = 1


def aspects_of(scenario: Scenario) -> tuple[str, ...]:
    """The parts of a scenario's record that are compared."""
    return (
        *EVERY_SCENARIO,
        *(WITH_CHECKPOINTS if scenario.saves else ()),
        *(("predictions",) if scenario.predicts else ()),
        *(("extra",) if scenario.extra else ()),
    )


REGISTERED: dict[str, Scenario] = {}


def add(scenario: Scenario) -> None:
    """Enter a scenario in the table.

    Raises:
        ValueError: if its name is taken.
    """
    if scenario.name in REGISTERED:
        raise ValueError(f"two scenarios are named {scenario.name!r}: rename one")
    REGISTERED[scenario.name] = scenario


def add_scripts(scripts: Mapping[str, Script], **facts: Any) -> None:
    """Enter scripts by the names of their scenarios; the keywords are `Scenario`'s."""
    for name, script in scripts.items():
        add(Scenario(name=name, run=script, **facts))


def scenario(**facts: Any) -> Callable[[Script], Script]:
    """Register the decorated script under its own name; the keywords are `Scenario`'s."""

    def register(script: Script) -> Script:
        add(Scenario(name=script.__name__, run=script, **facts))
        return script

    return register
