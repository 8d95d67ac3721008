"""One checkpoint written by several processes: each its part, and it appears when all are there, or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from littrainer.checkpoint.manifest import files_in
from littrainer.checkpoint.places import Place, place_of
from littrainer.checkpoint.sealing import Seal, Stamp
from littrainer.checkpoint.staging import (
    PART,
    UNFINISHED_DIR,
    StagedCheckpoint,
    delete_folder,
    naming_full_disk,
    own_place,
    staged_checkpoint,
)
from littrainer.distributed.agreement import are_several, failing_together, from_each

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


class StagedPart:
    """This process's view of a checkpoint that several write.

    Parameters:
        folder: where this process writes its files.
        whole: the checkpoint, where this process is the one that completes it.
    """

    def __init__(self, folder: Path, whole: StagedCheckpoint | None = None) -> None:
        self.folder = folder
        self._whole = whole

    @property
    def seal(self) -> Seal | None:
        """What is told of complete files, in the process that completes the checkpoint."""
        return None if self._whole is None else self._whole.seal

    @property
    def stamps(self) -> dict[str, Stamp]:
        """The files as they were sealed; empty before, and in other processes."""
        return {} if self._whole is None else self._whole.stamps


@contextlib.contextmanager
def staged_together(trainer: Trainer, final: Path) -> Iterator[StagedPart]:
    """Write a checkpoint as `staged_checkpoint` does, each process its part; it stands when this ends in any of them.

    Parameters:
        final: the checkpoint's folder.

    Raises:
        OSError: the disk is full; the error names the checkpoint and the file.
        FailedElsewhere: another process could not write its part, which its error says.
    """
    with contextlib.ExitStack() as unfinished:
        with filled_together(trainer, final, unfinished) as part:
            yield part
        with failing_together(f"writing {final}"):
            unfinished.close()


@contextlib.contextmanager
def filled_together(trainer: Trainer, final: Path, unfinished: contextlib.ExitStack) -> Iterator[StagedPart]:
    """As `staged_together`, up to where all parts are written; closing `unfinished` completes the checkpoint."""
    if not are_several():
        staged = unfinished.enter_context(staged_checkpoint(final))
        yield StagedPart(staged.folder, staged)
        return
    writing = f"writing {final}"
    place = place_of(trainer, final.parent)
    with contextlib.ExitStack() as own_folder:
        with failing_together(writing):
            if place.leads:
                staged = unfinished.enter_context(staged_checkpoint(final))
                part = StagedPart(staged.folder, staged)
            elif place.has_own_folder:
                part = StagedPart(own_folder.enter_context(_folder_for_part(final, trainer.args.process_index)))
            else:
                part = StagedPart(own_place(final.parent / UNFINISHED_DIR) / final.name)
        # Before the others are told.
        with failing_together(writing), naming_full_disk(part.folder, final):
            yield part
        if place.some_have_own_folder:
            _bring(part.folder, place, writing)


@contextlib.contextmanager
def _folder_for_part(final: Path, rank: int) -> Iterator[Path]:
    unfinished = own_place(final.parent / UNFINISHED_DIR)
    was_there = final.parent.exists()
    folder = unfinished / f"{final.name}{PART}{rank}"
    delete_folder(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            unfinished.rmdir()
            if not was_there:
                final.parent.rmdir()


def _bring(folder: Path, place: Place, writing: str) -> None:
    """Bring what processes wrote into folders of their own to the process that completes their checkpoint."""
    names = from_each(sorted(files_in(folder)))
    goes_to = from_each((place.leader or 0) if place.has_own_folder else None)
    contents: dict[str, bytes] = {}
    with failing_together(writing):
        if place.has_own_folder:
            there = set(names[place.leader or 0])
            contents = {name: (folder / name).read_bytes() for name in files_in(folder) if name not in there}
    brought = from_each(contents)
    with failing_together(writing):
        if place.leads:
            for receiver, files in zip(goes_to, brought, strict=True):
                if receiver == place.leader:
                    for name, content in files.items():
                        (folder / name).parent.mkdir(parents=True, exist_ok=True)
                        (folder / name).write_bytes(content)
