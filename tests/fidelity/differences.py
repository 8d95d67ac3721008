"""Print where two folders of records differ: `python -m tests.fidelity.differences EXPECTED ACTUAL [NAME ...]`."""

from __future__ import annotations

import pickle
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

from littrainer.commands.differences import first_difference
from tests.fidelity.record import Record

NOT_COMPARED = ("error", "automatic_optimization")


@cache
def read_record(folder: Path, name: str) -> Record:
    """The record of one scenario; a record with an error where its run never came to an end."""
    path = folder / f"{name}.pickle"
    if not path.exists():
        return Record(error=f"the run left no record of {name!r}; see {folder / 'log'}")
    record = pickle.loads(path.read_bytes())
    assert isinstance(record, Record)
    return record


def differing_aspects(expected: Record, actual: Record) -> dict[str, str]:
    """The first difference of each aspect that differs; under "error" the last line of a traceback."""
    for side in (expected, actual):
        if side.error:
            return {"error": side.error.strip().splitlines()[-1]}
    found = {}
    for aspect in (field.name for field in fields(Record)):
        if aspect not in NOT_COMPARED:
            difference = first_difference(getattr(expected, aspect), getattr(actual, aspect))
            if difference:
                found[aspect] = difference
    return found


def main(expected: Path, actual: Path, wanted: list[str]) -> None:
    names = wanted or sorted(path.stem for path in expected.glob("*.pickle"))
    differing = 0
    for name in names:
        found = differing_aspects(read_record(expected, name), read_record(actual, name))
        differing += bool(found)
        for aspect, difference in found.items():
            print(f"{name} / {aspect}{difference if difference.startswith('[') else ': ' + difference}")
    print(f"{len(names) - differing} of {len(names)} scenarios are equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
