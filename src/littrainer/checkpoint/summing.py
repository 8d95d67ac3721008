"""Files of torch.save, summed up while they are written."""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from littrainer.checkpoint.manifest import FileRecord

# After this many bytes the disk begins to take them, while the next ones are written.
BYTES_BETWEEN_SYNCS = 1 << 26


class SummingFile:
    """A file to write to, front to back, that knows the checksum of what was written; use it as a context.

    A long file goes to the disk while it grows.

    Parameters:
        path: the file, made anew.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._syncing = ThreadPoolExecutor(1)
        self._synced: Future[None] | None = None
        self._bytes_at_sync = 0
        self.record = FileRecord(0, 0)

    def write(self, data: Any) -> int:
        """Write all of a piece."""
        piece = memoryview(data).cast("B")
        self._write(piece)
        crc32 = zlib.crc32(piece, self.record.crc32)
        self.record = FileRecord(self.record.size + len(piece), crc32)
        if self.record.size - self._bytes_at_sync >= BYTES_BETWEEN_SYNCS:
            self._begin_sync()
        return len(piece)

    def _begin_sync(self) -> None:
        if self._synced is None or self._synced.done():
            if self._synced is not None:
                self._synced.result()
            self._bytes_at_sync = self.record.size
            self._synced = self._syncing.submit(os.fsync, self.fileno())

    def _write(self, piece: memoryview) -> None:
        while piece:
            piece = piece[self._file.write(piece) :]

    def flush(self) -> None:
        """Nothing is kept back."""

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def __enter__(self) -> SummingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._syncing.shutdown()
        self._file.close()


def save_and_sum(value: Any, path: Path | str, without_inner_sums: bool = False) -> FileRecord:
    """`torch.save` to a file.

    Parameters:
        without_inner_sums: leave out the checksums that torch puts into its archives, which take half as long again as
            the writing. For large files with a record in a manifest.

    Returns:
        the file's size and checksum.
    """
    with SummingFile(Path(path)) as file, _inner_sums(not without_inner_sums):
        torch.save(value, file)  # type: ignore[arg-type]
    return file.record


@contextlib.contextmanager
def _inner_sums(wanted: bool) -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    # It is one setting for all threads, and another one may be saving a file of the user's own.
    if wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
