"""Names in a checkpoint's folder, those that transformers gives and those of our own, and the names of the folders."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from littrainer.runtime.remote_folder import get_remote_url

PREFIX_CHECKPOINT_DIR = "checkpoint"
# A longer number fits into no file system's names.
CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d{{1,200}})")
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.bin"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
RANDOM_STATE_NAME = "rng_state.pth"
# Instead of optimizer.pt, and of files of weights: what is written where each process writes its part. Patterns.
# Files of DeepSpeed's engine.
ENGINE_SHARDS = "global_step*/*"
OPTIMIZER_SHARDS = ("optimizer.bin", "optimizer_0/*", ENGINE_SHARDS)
WEIGHT_SHARDS = ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/*", ENGINE_SHARDS)
# Ours: what exact resuming needs besides the files of transformers.
RESUME_RECORD_NAME = "littrainer_resume.pt"
# Ours, in the run's folder: its arguments as text that `littrainer report` shows.
RUN_RECORD_NAME = "littrainer_run.json"
# Ours, in the run's folder: where the processes stood when one of them failed or hung.
STACKS_NAME = "littrainer_stacks.txt"
# Ours: the state of a lightning.Trainer that writes folders of this format.
LIGHTNING_STATE_NAME = "lightning_state.pt"
# Files of transformers in checkpoints of FSDP, in one file or in parts, and the index of a folder of parts.
FSDP_WEIGHTS_NAME = "pytorch_model_fsdp.bin"
FSDP_OPTIMIZER_NAME = "optimizer.bin"
WEIGHTS_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
SHARD_INDEX_NAME = ".metadata"


def resume_record_name(rank: int) -> str:
    """Ours: what exact resuming needs of one of several processes; the first one's is in the file of all."""
    stem, _, suffix = RESUME_RECORD_NAME.rpartition(".")
    return f"{stem}_{rank}.{suffix}" if rank else RESUME_RECORD_NAME


def random_state_name(args: Any) -> str:
    """Return the file with this process's states: each of several processes has its own."""
    return RANDOM_STATE_NAME if args.world_size <= 1 else rank_file(args.process_index)


def rank_file(rank: int | str) -> str:
    """Return the file with the states of one of several processes."""
    return f"rng_state_{rank}.pth"


def checkpoint_folder(run_dir: str | Path, step: int) -> Path:
    """Return the folder of the checkpoint that a run writes at an optimizer step."""
    return Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def checkpoint_step(path: str | Path) -> int | None:
    """Return the optimizer step in the name of a checkpoint directory; None for any other name."""
    match = CHECKPOINT.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """Return the checkpoints in a folder, the highest step first; a folder that is missing is an OSError."""
    matches = {path: CHECKPOINT.fullmatch(path.name) for path in Path(run_dir).iterdir()}
    steps = {path: int(match[1]) for path, match in matches.items() if match and path.is_dir()}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def make_output_dir(folder: str) -> None:
    """Make the folder of a run, unless there is one; an OSError says why it cannot be made."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        reason = "is a file" if os.path.isfile(folder) else f"cannot be made ({error.strerror})"
        if os.path.islink(link := error.filename or folder):
            reason = f"cannot be made: {link} is a link to {os.readlink(link)}, where there is no folder"
        words = f"output_dir={folder!r} {reason}. Give the path of a folder"
        if address := get_remote_url(folder):
            words = f"What goes to {address} is written to {folder} first, which {reason}. Set XDG_CACHE_HOME to one"
        raise OSError(error.errno, f"{words} that can be written to", error.filename) from None


def read_shard_names(index: Path) -> list[str]:
    """Return the files that an index of weights names; the ValueError for any other file does not name the file."""
    try:
        return sorted({*map(str, json.loads(index.read_text("utf-8"))["weight_map"].values())})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"is no readable index of shards ({error!r})") from error


def has_fsdp_weights(folder: Path) -> bool:
    """Return whether a checkpoint has weights in either of these forms."""
    return (folder / FSDP_WEIGHTS_NAME).is_file() or has_sharded_state(folder / WEIGHTS_FOLDER)


def has_sharded_state(folder: Path) -> bool:
    """Return whether there is a folder in which each process has written its part."""
    return (folder / SHARD_INDEX_NAME).is_file()
