"""One of several processes that agree: `python -m tests.distributed.agreeing_process FOLDER`.

Each writes what it found to `FOLDER/RANK.json`; the last check is one in which process 1 is killed.
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

from littrainer.distributed import agreement
from littrainer.distributed.agreement import (
    agreed,
    begin_counting,
    failing_together,
    from_each,
    from_first,
    from_first_to_each,
    largest,
)
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS, end_process

LONGEST_WAIT = timedelta(seconds=LONGEST_WAIT_SECONDS)


def error_of(work: Callable[[], Any]) -> str:
    try:
        return f"no error: {work()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def main(rank: int, size: int, folder: Path) -> None:
    meeting = folder / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=LONGEST_WAIT)

    def fails_in_second() -> str:
        with failing_together("writing checkpoint-5"):
            if rank == 1:
                raise OSError(28, "No space left on device")
        return "went on"

    def fails_in_all() -> None:
        with failing_together("writing"):
            raise KeyError(rank)

    def fails_before_others_agree() -> None:
        with failing_together("all of it"):
            if rank == 1:
                raise ValueError("too early")
            with failing_together("a part of it"):
                from_each("never received")

    def fails_within_and_is_wrapped() -> None:
        with failing_together("all of it"):
            try:
                with failing_together("a part of it"):
                    if rank == 0:
                        raise ValueError("in the part")
            except ValueError as error:
                raise LookupError("wrapped") from error

    def is_interrupted() -> None:
        with failing_together("waiting"):
            if rank == 1:
                raise KeyboardInterrupt

    def is_elsewhere() -> None:
        if rank == 1:
            from_each(1)
        else:
            largest(1)

    def counts_while_others_agree() -> list[int]:
        count = begin_counting([True, rank == 1, False])
        largest(rank)
        return count()

    def dies() -> None:
        with failing_together("writing"):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    found: dict[str, Any] = {
        "flags": [agreed(False), agreed(rank == 1), agreed(True)],
        "largest": largest(10 * rank),
        "from each": from_each({"rank": rank, "text": "x" * rank}),
        "from first": from_first([rank, "first"]),
        "for each": from_first_to_each([["for", other] for other in range(size)] if rank == 0 else None),
        "counts": counts_while_others_agree(),
        "succeeds": error_of(lambda: from_each(rank)),
    }
    for work in (
        fails_in_second,
        fails_in_all,
        fails_before_others_agree,
        fails_within_and_is_wrapped,
        is_interrupted,
        is_elsewhere,
    ):
        found[work.__name__] = error_of(work)
    found["after all that"] = from_each(rank)
    group = agreement._host_group
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}-again", rank=rank, world_size=size, timeout=LONGEST_WAIT
    )
    found["in a new group"] = [from_each(rank), agreement._host_group is not group]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    found["dies"] = error_of(dies)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]))
    end_process()
