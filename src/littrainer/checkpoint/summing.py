"""Files of torch.save, summed up while they are written."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from littrainer.checkpoint.manifest import FileRecord

# Below this number of bytes handing them to another thread takes longer than summing them up.
WORTH_A_THREAD = 1 << 18
# After this many bytes the disk begins to take them, while the next ones are written.
BYTES_BETWEEN_SYNCS = 1 << 26


class SummingFile:
    """A file to write to, front to back, that knows the checksum of what was written; use it as a context.

    Large pieces are summed up in a thread while they are written, and a long file goes to the disk while it grows.

    Parameters:
        path: the file, made anew.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._summing, self._syncing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._synced: Future[None] | None = None
        self._bytes_at_sync = 0
        self.record = FileRecord(0, 0)

    def write(self, data: Any) -> int:
        """Write all of a piece."""
        piece = memoryview(data).cast("B")
        if len(piece) < WORTH_A_THREAD:
            self._write(piece)
            crc32 = zlib.crc32(piece, self.record.crc32)
        else:
            # The memory is the caller's again when this returns, so the sum is waited for.
            summed = self._summing.submit(zlib.crc32, piece, self.record.crc32)
            try:
                self._write(piece)
            finally:
                crc32 = summed.result()
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
        for pool in (self._summing, self._syncing):
            pool.shutdown()
        self._file.close()


def save_and_sum(value: Any, path: Path | str) -> FileRecord:
    """`torch.save` to a file.

    Returns:
        the file's size and checksum.
    """
    with SummingFile(Path(path)) as file:
        torch.save(value, file)  # type: ignore[arg-type]
    return file.record
