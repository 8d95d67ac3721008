"""Collectives in several processes: `python -m tests.distributed.collectives_process FOLDER`.

Each process writes its results to `FOLDER/RANK.json`. The last check kills process 1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from littrainer.distributed import collectives
from littrainer.distributed.collectives import (
    all_gather_object,
    all_reduce_max,
    any_rank,
    broadcast_object,
    raise_on_all_ranks,
    scatter_object,
)
from tests.scenarios.other_processes import MAX_WAIT_SECONDS, end_process

MAX_WAIT = timedelta(seconds=MAX_WAIT_SECONDS)


def get_error(work: Callable[[], Any]) -> str:
    try:
        return f"no error: {work()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def main(rank: int, size: int, folder: Path) -> None:
    meeting = folder / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=MAX_WAIT)

    def fails_in_second() -> str:
        with raise_on_all_ranks("writing checkpoint-5"):
            if rank == 1:
                raise OSError(28, "No space left on device")
        return "went on"

    def fails_in_all() -> None:
        with raise_on_all_ranks("writing"):
            raise KeyError(rank)

    def fails_before_an_exchange() -> None:
        with raise_on_all_ranks("all of it"):
            if rank == 1:
                raise ValueError("too early")
            with raise_on_all_ranks("a part of it"):
                all_gather_object("never received")

    def fails_within_and_is_wrapped() -> None:
        with raise_on_all_ranks("all of it"):
            try:
                with raise_on_all_ranks("a part of it"):
                    if rank == 0:
                        raise ValueError("in the part")
            except ValueError as error:
                raise LookupError("wrapped") from error

    def is_interrupted() -> None:
        with raise_on_all_ranks("waiting"):
            if rank == 1:
                raise KeyboardInterrupt

    def is_elsewhere() -> None:
        if rank == 1:
            all_gather_object(1)
        else:
            all_reduce_max(1)

    def dies() -> None:
        with raise_on_all_ranks("writing"):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    results: dict[str, Any] = {
        "flags": [any_rank(False), any_rank(rank == 1), any_rank(True)],
        "largest": all_reduce_max(10 * rank),
        "gathered": all_gather_object({"rank": rank, "text": "x" * rank}),
        "broadcast": broadcast_object([rank, "first"]),
        "scattered": scatter_object([["for", other] for other in range(size)] if rank == 0 else None),
        "succeeds": get_error(lambda: all_gather_object(rank)),
    }
    for work in (
        fails_in_second,
        fails_in_all,
        fails_before_an_exchange,
        fails_within_and_is_wrapped,
        is_interrupted,
        is_elsewhere,
    ):
        results[work.__name__] = get_error(work)
    results["afterwards"] = all_gather_object(rank)
    group = collectives._host_group
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{meeting}-again", rank=rank, world_size=size, timeout=MAX_WAIT)
    results["in a new group"] = [all_gather_object(rank), collectives._host_group is not group]
    (folder / f"{rank}.json").write_text(json.dumps(results))
    results["dies"] = get_error(dies)
    (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]))
    end_process()
