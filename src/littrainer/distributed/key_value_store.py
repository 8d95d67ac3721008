"""Values that the first process leaves for the others, without waiting until they have come for them.

If processes agree (agreement.py) all come to the same place. Here the first one may be elsewhere already, or come to
places where the others never come.
"""

from __future__ import annotations

import pickle
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from littrainer.distributed.agreement import longest_wait
from littrainer.distributed.failure_report import FailedElsewhere, LostProcess, ended_processes

VALUE, CLOSED = "value/", "closed"
SECONDS_BETWEEN_LOOKS = 0.01
# After which a wait is long enough to ask whether the first process is still there.
SECONDS_OF_A_SHORT_WAIT = 5.0


class KeyValueStore:
    """Values by name, from the first process.

    Parameters:
        key: what all processes call this store, and no other.

    Raises:
        RuntimeError: the processes share no store, as those of MPI.
    """

    def __init__(self, key: str):
        shared: Any = dist.distributed_c10d._get_default_store()
        if shared is None:
            raise RuntimeError(
                'Processes connected by ddp_backend="mpi" have no store to leave values in; use "gloo" or "nccl".'
            )
        self._store: Any = dist.PrefixStore(f"littrainer/values/{key}", shared)
        self._names: list[str] = []

    def post(self, name: str, value: Any) -> None:
        """Leave a value, pickled; in the first process."""
        self._store.set(VALUE + name, pickle.dumps(value))
        self._names.append(VALUE + name)

    def fetch(self, name: str, what: str, before: str | None = None) -> Any:
        """Wait for the value of that name, in another process, and return it.

        Parameters:
            what: for errors: "the hyperparameter 'rate'".
            before: the name of a value that the first process leaves later than this one, if it leaves this one.

        Raises:
            KeyError: the first process has left the later one without this one.
            FailedElsewhere: the first process leaves nothing more, and has left none of that name.
            LostProcess: it has ended, or has left none within the time that processes wait for each other.
        """
        waits, begun = f"Process {dist.get_rank()} waits for {what}", time.monotonic()
        try:
            while not self._has(VALUE + name):
                # In this order: what was left before the end is there when the end is.
                if self._has(CLOSED) and not self._has(VALUE + name):
                    raise FailedElsewhere(f"{waits}, and process 0 has failed without it")
                if before is not None and self._has(VALUE + before) and not self._has(VALUE + name):
                    raise KeyError(name)
                waited = time.monotonic() - begun
                if waited > longest_wait().total_seconds():
                    raise LostProcess(
                        f"{waits} from process 0, which has not come to it within ddp_timeout. What depends on the "
                        "rank must not decide what is asked for."
                    )
                if waited > SECONDS_OF_A_SHORT_WAIT and 0 in ended_processes():
                    raise LostProcess(f"{waits} from process 0, which has ended.")
                time.sleep(SECONDS_BETWEEN_LOOKS)
            return pickle.loads(self._store.get(VALUE + name))
        except (FailedElsewhere, LostProcess):
            raise
        except RuntimeError as error:
            raise LostProcess(f"{waits} from process 0, which cannot be reached.") from error

    def _has(self, name: str) -> bool:
        return self._store.check([name])

    def close(self) -> None:
        """Leave nothing more; who waits for a value that is not there learns of it."""
        with suppress(RuntimeError):
            self._store.set(CLOSED, b"")

    def clear(self) -> None:
        """Remove what was left, when nobody fetches any more."""
        for name in [*self._names, CLOSED]:
            # A file that serves as a store keeps everything.
            with suppress(RuntimeError, NotImplementedError):
                self._store.delete_key(name)
