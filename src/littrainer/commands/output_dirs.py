"""Cleanup after Trainers that a command creates without training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def remove_output_dirs(should_create: bool = True) -> Iterator[list[OSError]]:
    """Remove empty folders that Trainers create in the block, and collect errors of those that cannot be made."""
    from littrainer import trainer as module

    trainer_class: Any = module.Trainer
    make_output_dir, init_hf_repo = module.make_output_dir, trainer_class.init_hf_repo
    created: list[Path] = []
    errors: list[OSError] = []

    def create_output_dir(folder: str) -> None:
        if not should_create:
            return
        path = Path(folder).absolute()
        created.extend(parent for parent in (path, *path.parents) if not parent.exists())
        try:
            make_output_dir(folder)
        except OSError as error:
            errors.append(error)

    module.make_output_dir, trainer_class.init_hf_repo = create_output_dir, lambda *_, **__: None
    try:
        yield errors
    finally:
        module.make_output_dir, trainer_class.init_hf_repo = make_output_dir, init_hf_repo
        for folder in created:
            with contextlib.suppress(OSError):
                folder.rmdir()
