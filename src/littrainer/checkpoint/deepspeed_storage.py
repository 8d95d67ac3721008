"""Checkpoints of a training that DeepSpeed carries out: beside the model a folder of its engine, `global_step<N>`.

Each process writes its part of the optimizer's states into it, and in stage 3 of the parameters. The engine reads
weights, optimizer and its own schedule from there, and `zero_to_fp32.py`, which it leaves beside it, makes whole
weights of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from littrainer.checkpoint.layout import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from littrainer.checkpoint.sealing import Seal
from littrainer.checkpoint.whole_storage import WholeStorage
from littrainer.distributed.layout import data_parallel_size
from littrainer.ecosystem import is_a

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

ENGINE_FOLDERS = "global_step*"
# The file that names the folder to read.
LATEST_NAME = "latest"
PART_OF_PROCESS = re.compile(r".*zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")


class EngineStorage(WholeStorage):
    """Weights and optimizer state as DeepSpeed's engine writes and reads them, in all processes together."""

    optimizer_names = (LATEST_NAME,)
    can_be_copied = False

    def save_model(self, trainer: Trainer, output_dir: str) -> None:
        """Write the model. In stage 3 its weights are gathered if the configuration says so; else the engine's are."""
        config: Any = trainer.args.hf_deepspeed_config
        if not config.is_zero3():
            super().save_model(trainer, output_dir)
            return
        from littrainer.strategies.deepspeed import start_for_evaluation

        start_for_evaluation(trainer)
        engine: Any = trainer.deepspeed
        if engine.zero_gather_16bit_weights_on_model_save():
            weights = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=_has_adapters(trainer))
            if weights is not None:
                trainer._save(output_dir, state_dict=weights)
            return
        logger.warning(
            "stage3_gather_16bit_weights_on_model_save is off, so the weights in %s are in the files of DeepSpeed's "
            "engine: run the zero_to_fp32.py beside them to get whole ones.",
            output_dir,
        )
        if trainer.args.should_save:
            trainer._save(output_dir, state_dict={})
            for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
                (Path(output_dir) / name).unlink(missing_ok=True)
        self._save_engine(trainer, Path(output_dir))

    def save_optimizer(self, trainer: Trainer, folder: Path, seal: Seal | None) -> None:
        """Let the engine write weights, optimizer and its own schedule."""
        self._save_engine(trainer, folder)

    def _save_engine(self, trainer: Trainer, folder: Path) -> None:
        trainer.deepspeed.save_checkpoint(str(folder), exclude_frozen_parameters=_has_adapters(trainer))

    def holds_weights(self, folder: Path) -> bool:
        """Whether the engine has written its folder."""
        return any(folder.glob(ENGINE_FOLDERS))

    def load_model(
        self, trainer: Trainer, model: nn.Module, folder: Path, to_resume: bool, tell: Callable[[Any], None]
    ) -> None:
        """Load the weights of the best model; those of a training that is resumed come with the optimizer's state."""
        _check(trainer, folder)
        if not to_resume:
            _load_engine(trainer, folder)

    def load_optimizer(self, trainer: Trainer, folder: Path) -> None:
        """Load weights, optimizer and the engine's own schedule."""
        _check(trainer, folder)
        _load_engine(trainer, folder)


def _load_engine(trainer: Trainer, folder: Path) -> None:
    path, _ = trainer.deepspeed.load_checkpoint(
        str(folder),
        load_module_strict=not _has_adapters(trainer),
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
    )
    if path is None:
        raise ValueError(f"DeepSpeed could not load {folder}. Its log says why; resume from another checkpoint.")


def _check(trainer: Trainer, folder: Path) -> None:
    if not any(folder.glob(ENGINE_FOLDERS)):
        raise ValueError(
            f"{folder} has no folder {ENGINE_FOLDERS} of DeepSpeed's engine, so DeepSpeed cannot go on from it. Resume "
            "it without `deepspeed`, or load its model with from_pretrained and start a new training."
        )
    latest = folder / LATEST_NAME
    if not latest.is_file() or not (folder / latest.read_text("utf-8").strip()).is_dir():
        there = ", ".join(sorted(path.name for path in folder.glob(ENGINE_FOLDERS)))
        raise ValueError(f"{latest} has to name the folder that DeepSpeed's engine reads; there is {there}.")
    parts = (PART_OF_PROCESS.fullmatch(path.name) for path in (folder / latest.read_text("utf-8").strip()).iterdir())
    wrote = len({part[1] for part in parts if part is not None})
    config: Any = trainer.args.hf_deepspeed_config
    size = data_parallel_size(trainer.args)
    if wrote not in (0, size) and not config.is_true("checkpoint.load_universal"):
        raise ValueError(
            f"{folder} was written by {wrote} processes, and there are {size}: DeepSpeed goes on with as many as "
            "before. Start so many, or convert it with DeepSpeed's ds_to_universal.py and set "
            '"checkpoint": {"load_universal": true} in its configuration.'
        )


def _has_adapters(trainer: Trainer) -> bool:
    return is_a(trainer.model, "peft model")
