"""Models and checkpoints as files for a tracker to upload."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from littrainer.checkpoint.layout import PREFIX_CHECKPOINT_DIR, TRAINING_ARGS_NAME

logger = logging.getLogger(__name__)

ARCHITECTURE_NAME = "model_architecture.txt"


def newest_checkpoint(args: Any, state: Any, trial_folder: Path | None = None) -> Path | None:
    """The checkpoint of the current optimizer step; None, with a warning, where there is none.

    Parameters:
        trial_folder: where a trial's checkpoints lie; `output_dir` outside of a search.
    """
    folder = Path(trial_folder or args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
    if folder.is_dir():
        return folder
    logger.warning("The checkpoint %s is not uploaded, since there is no such folder.", folder)
    return None


def write_final_model(folder: str, args: Any, model: Any, processing_class: Any) -> None:
    """Write a model as `Trainer.save_model` does."""
    from littrainer.checkpoint.arguments_file import write_arguments
    from littrainer.checkpoint.weights import write_weights

    write_weights(model, folder)
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    write_arguments(args, os.path.join(folder, TRAINING_ARGS_NAME))


def write_architecture(folder: str, model: Any) -> None:
    """Write a model's modules as text."""
    Path(folder, ARCHITECTURE_NAME).write_text(f"{model}\n", encoding="utf-8")
