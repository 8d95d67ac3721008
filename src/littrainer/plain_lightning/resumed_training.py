"""What `train()` resumes from, where Lightning wrote it: made a Trainer's folder for as long as training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.checkpoint.staging import delete_folder
from littrainer.distributed.agreement import failing_together
from littrainer.plain_lightning.trainer_format import (
    TAKEN_OVER,
    check_is_ours,
    is_lightnings,
    read_checkpoint,
    write_trainer_folder,
)

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

# How the folder's name begins. Nothing that begins so is pushed to the Hub, should the process be killed.
FOLDER = ".littrainer_from"


@contextlib.contextmanager
def checkpoint_of_trainer(trainer: Trainer, resume_from_checkpoint: Any) -> Iterator[Any]:
    """What `train()` resumes from, as a folder of a Trainer where it is something of Lightning's.

    That is a .ckpt, a folder of `TransformersCheckpointIO`, or what `from_lightning` has taken over. The folder is made
    in `output_dir`, and gone when training has ended.

    Raises:
        ValueError: it is no checkpoint of a TransformersModule, or of another model.
    """
    taken_over = trainer._lightning_checkpoint
    if not resume_from_checkpoint and taken_over is not None:
        source, name = TAKEN_OVER, f"{FOLDER}-lightning-step-{taken_over['global_step']}"
    elif isinstance(resume_from_checkpoint, (str, Path)) and is_lightnings(Path(resume_from_checkpoint)):
        source, taken_over = str(resume_from_checkpoint), None
        name = f"{FOLDER}-{Path(source).name}"
    else:
        yield resume_from_checkpoint
        return
    folder = Path(trainer.args.output_dir) / name
    with failing_together(f"reading {source}"):
        if trainer.args.process_index == 0:
            checkpoint = read_checkpoint(Path(source)) if taken_over is None else taken_over
            check_is_ours(checkpoint, source)
            write_trainer_folder(checkpoint, folder, trainer.model, trainer.args, source)
    try:
        yield str(folder)
    finally:
        if taken_over is None or trainer.state.global_step != taken_over["global_step"]:
            # Training has gone on from it; what failed before its first step can be called again.
            trainer._lightning_checkpoint = None
        if trainer.args.process_index == 0:
            delete_folder(folder)
