"""The known name that somebody most likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Known name -> words of other libraries and of everyday speech for the same thing. They go before names that are alike
# in spelling, which may mean something else.
OTHER_WORDS = {
    # Arguments.
    "output_dir": "save_dir out_dir output folder default_root_dir",
    "num_train_epochs": "epochs n_epochs num_epochs max_epochs",
    "max_steps": "steps num_steps train_steps total_steps",
    "learning_rate": "lr",
    "per_device_train_batch_size": "batch_size train_batch_size micro_batch_size bs",
    "per_device_eval_batch_size": "val_batch_size test_batch_size",
    "gradient_accumulation_steps": "accumulation_steps grad_accum gradient_accumulation accumulate_grad_batches",
    "max_grad_norm": "grad_clip clip_grad clip_grad_norm gradient_clip_val",
    "weight_decay": "decay wd l2",
    "warmup_steps": "warmup num_warmup_steps",
    "lr_scheduler_type": "scheduler schedule",
    "bf16": "precision mixed_precision amp dtype torch_dtype",
    "eval_steps": "eval_every val_check_interval",
    "save_steps": "save_every",
    "save_total_limit": "save_top_k",
    "logging_steps": "log_every log_steps log_every_n_steps",
    "report_to": "logger loggers wandb tensorboard",
    "metric_for_best_model": "metric monitor",
    "dataloader_num_workers": "workers",
    "resume_from_checkpoint": "resume ckpt_path",
    # Optimizers and schedules.
    "adamw_torch": "adam adamw",
    "lion_32bit": "lion",
    "reduce_lr_on_plateau": "plateau",
    "warmup_stable_decay": "wsd",
    # Parameters of a Trainer.
    "train_dataset": "dataset data",
    "data_collator": "collate_fn",
    "compute_loss_func": "loss_fn criterion",
    "optimizers": "scheduler",
    "args": "training_args config",
}


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The member of `known` that means what `name` says, else the one most like it; None where nothing is similar."""
    known, word = list(known), name.lower().replace("-", "_")
    for match in known:
        if word in OTHER_WORDS.get(match, "").split():
            return match
    matches = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(word, known, n=1)
    return matches[0] if matches else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Half a sentence to follow an unknown name: what it may have meant, or what there is to choose from."""
    known = list(known)
    match = nearest_name(name, known)
    if match is not None:
        return f"did you mean {match!r}?"
    if len(known) <= 10:
        return f"known are {', '.join(known)}"
    return "no known name is similar"
