"""What `train()` resumes from, where Lightning wrote it: made a Trainer's folder for as long as training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.checkpoint.staging import delete_folder
from littrainer.lightning.trainer_format import is_lightnings, read_checkpoint, write_trainer_folder
from littrainer.processes.agreement import failing_together

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

# How the folder's name begins. Nothing that begins so is pushed to the Hub, should the process be killed.
FOLDER = ".littrainer_from"


@contextlib.contextmanager
def checkpoint_of_trainer(trainer: Trainer, resume_from_checkpoint: Any) -> Iterator[Any]:
    """What `train()` resumes from, as a folder of a Trainer if it is something of Lightning's.

    That is a .ckpt, or a folder of `TransformersCheckpointIO`. The folder is made in `output_dir`, and gone when
    training has ended.

    Raises:
        ValueError: it is no checkpoint of a TransformersModule, or of another model.
    """
    if not isinstance(resume_from_checkpoint, (str, Path)) or not is_lightnings(Path(resume_from_checkpoint)):
        yield resume_from_checkpoint
        return
    source = Path(resume_from_checkpoint)
    folder = Path(trainer.args.output_dir) / f"{FOLDER}-{source.name}"
    with failing_together(f"reading {source}"):
        if trainer.args.process_index == 0:
            write_trainer_folder(read_checkpoint(source), folder, trainer.model, trainer.args, str(source))
    try:
        yield str(folder)
    finally:
        if trainer.args.process_index == 0:
            delete_folder(folder)
