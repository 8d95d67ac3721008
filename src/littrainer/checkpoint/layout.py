"""Names of checkpoint folders and files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from littrainer.runtime.remote_folder import get_remote_url

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

PREFIX_CHECKPOINT_DIR = "checkpoint"
LAST_CHECKPOINT = "last-checkpoint"  # pushed to the Hub
# At most as many digits as a file name can have.
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
# Patterns of shards that replace optimizer.pt and weights.
ENGINE_SHARDS = "global_step*/*"
OPTIMIZER_SHARDS = ("optimizer.bin", "optimizer_0/*", ENGINE_SHARDS)
WEIGHT_SHARDS = ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/*", ENGINE_SHARDS)
RESUME_RECORD_NAME = "littrainer_resume.pt"
# In the run's folder: arguments, versions and data for `littrainer report`.
RUN_RECORD_NAME = "littrainer_run.json"
# In the run's folder: stack traces after a failure or hang.
STACKS_NAME = "littrainer_stacks.txt"
LIGHTNING_STATE_NAME = "lightning_state.pt"
# transformers' FSDP files, full or sharded, and the index of a sharded folder.
FSDP_WEIGHTS_NAME = "pytorch_model_fsdp.bin"
FSDP_OPTIMIZER_NAME = "optimizer.bin"
WEIGHTS_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
SHARD_INDEX_NAME = ".metadata"


def resume_record_name(rank: int) -> str:
    stem, _, suffix = RESUME_RECORD_NAME.rpartition(".")
    return f"{stem}_{rank}.{suffix}" if rank else RESUME_RECORD_NAME


def random_state_name(args: TrainingArguments) -> str:
    return RANDOM_STATE_NAME if args.world_size <= 1 else rank_file(args.process_index)


def rank_file(rank: int | str) -> str:
    return f"rng_state_{rank}.pth"


def checkpoint_folder(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def checkpoint_step(path: str | Path) -> int | None:
    match = CHECKPOINT.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """List the checkpoints in a folder, highest step first."""
    matches = {path: CHECKPOINT.fullmatch(path.name) for path in Path(run_dir).iterdir()}
    steps = {path: int(match[1]) for path, match in matches.items() if match and path.is_dir()}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def make_output_dir(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        reason = "is a file" if os.path.isfile(folder) else f"cannot be made ({error.strerror})"
        if os.path.islink(link := error.filename or folder):
            reason = f"cannot be made: {link} is a link to {os.readlink(link)}, where there is no folder"
        text = f"output_dir={folder!r} {reason}. Give the path of a folder"
        if url := get_remote_url(folder):
            text = f"Uploads to {url} are written to {folder} first, which {reason}. Set XDG_CACHE_HOME to one"
        raise OSError(error.errno, f"{text} that can be written to", error.filename) from None


def read_shard_names(index: Path) -> list[str]:
    try:
        return sorted({*map(str, json.loads(index.read_text("utf-8"))["weight_map"].values())})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"is no readable index of shards ({error!r})") from error


def has_fsdp_weights(folder: Path) -> bool:
    return (folder / FSDP_WEIGHTS_NAME).is_file() or has_sharded_state(folder / WEIGHTS_FOLDER)


def has_sharded_state(folder: Path) -> bool:
    return (folder / SHARD_INDEX_NAME).is_file()
