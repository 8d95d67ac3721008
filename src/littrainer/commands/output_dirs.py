"""Trainers that a command makes without training leave no folder and no repository."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def remove_output_dirs(are_made: bool = True) -> Iterator[None]:
    """Remove the folders that Trainers have made in the block, unless a script has written into them.

    Parameters:
        are_made: let Trainers make them.
    """
    from littrainer import trainer as module

    trainer_class: Any = module.Trainer
    make_output_dir, init_hf_repo = module.make_output_dir, trainer_class.init_hf_repo
    made: list[Path] = []

    def make_and_note(folder: str) -> None:
        if not are_made:
            return
        path = Path(folder).absolute()
        made.extend(part for part in (path, *path.parents) if not part.exists())
        make_output_dir(folder)

    module.make_output_dir, trainer_class.init_hf_repo = make_and_note, lambda *_, **__: None
    try:
        yield
    finally:
        module.make_output_dir, trainer_class.init_hf_repo = make_output_dir, init_hf_repo
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
