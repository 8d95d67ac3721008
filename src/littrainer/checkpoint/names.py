"""Names of the files in a checkpoint's folder: those that transformers gives them, and those of our own."""

from __future__ import annotations

PREFIX_CHECKPOINT_DIR = "checkpoint"
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.bin"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
RANDOM_STATE_NAME = "rng_state.pth"
# In the place of optimizer.pt, and of files of weights: what is written where each process writes its part. Patterns.
# What DeepSpeed's engine writes.
ENGINE_PARTS = "global_step*/*"
OPTIMIZER_PARTS = ("optimizer.bin", "optimizer_0/*", ENGINE_PARTS)
WEIGHT_PARTS = ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/*", ENGINE_PARTS)
# Ours: what exact resuming needs beside the files of transformers.
RESUME_RECORD_NAME = "littrainer_resume.pt"
# Ours, in the run's folder: its arguments as text that `littrainer report` shows.
RUN_RECORD_NAME = "littrainer_run.json"
# Ours: the state of a lightning.Trainer that writes folders of this format.
LIGHTNING_STATE_NAME = "lightning_state.pt"


def resume_record_name(rank: int) -> str:
    """Ours: what exact resuming needs of one of several processes; the first one's is in the file of all."""
    stem, _, suffix = RESUME_RECORD_NAME.rpartition(".")
    return f"{stem}_{rank}.{suffix}" if rank else RESUME_RECORD_NAME
