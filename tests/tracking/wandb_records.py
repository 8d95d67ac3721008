"""Reader of offline runs of wandb: a `.wandb` file is a LevelDB log of protocol buffers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32768
RECORD_HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class WandbRun:
    """An offline run.

    Parameters:
        history: the rows, without wandb's columns (with an underscore).
        artifacts: names, with their aliases.
        exit_code: exit code of the run; None while it is open.
    """

    name: str = ""
    project: str = ""
    group: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: list[tuple[str, list[str]]] = field(default_factory=list)
    exit_code: int | None = None


def read_run(folder: Path) -> WandbRun:
    """Read the complete records of the `.wandb` file below a folder."""
    run = WandbRun()
    for path in folder.rglob("*.wandb"):
        for data in _iterate_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            _add_record(run, record)
    return run


def _add_record(run: WandbRun, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        run.name, run.project, run.group = record.run.display_name, record.run.project, record.run.run_group
        run.config.update(_parse_values(record.run.config.update))
    elif kind == "config":
        run.config.update(_parse_values(record.config.update))
    elif kind == "history":
        run.history.append(_parse_values(record.history.item))
    elif kind == "summary":
        run.summary.update(_parse_values(record.summary.update))
    elif kind == "artifact":
        run.artifacts.append((record.artifact.name, list(record.artifact.aliases)))
    elif kind == "exit":
        run.exit_code = record.exit.exit_code


def _parse_values(items: Any) -> dict[str, Any]:
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    return {name: value for name, value in values.items() if not name.startswith("_")}


def _iterate_records(data: bytes) -> Iterator[bytes]:
    position, parts = FILE_HEADER_BYTES, []
    while position + RECORD_HEADER.size <= len(data):
        remaining_bytes = BLOCK_BYTES - position % BLOCK_BYTES
        if remaining_bytes < RECORD_HEADER.size:
            position += remaining_bytes
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, position)
        position += RECORD_HEADER.size
        if position + length > len(data):
            return
        parts.append(data[position : position + length])
        position += length
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []
