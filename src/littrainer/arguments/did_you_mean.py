"""The known name that somebody most likely meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# Known name -> words of other libraries and of everyday speech for the same thing. They go before names that are alike
# in spelling, which may mean something else.
OTHER_WORDS = {
    "output_dir": "save_dir out_dir output folder default_root_dir",
    "num_train_epochs": "epochs n_epochs num_epochs max_epochs",
    "learning_rate": "lr",
    "per_device_train_batch_size": "batch_size train_batch_size micro_batch_size bs",
    "per_device_eval_batch_size": "val_batch_size test_batch_size",
    "gradient_accumulation_steps": "accumulation_steps grad_accum gradient_accumulation accumulate_grad_batches",
    "max_grad_norm": "grad_clip clip_grad clip_grad_norm gradient_clip_val",
    "weight_decay": "decay wd l2",
    "bf16": "precision mixed_precision amp dtype torch_dtype",
    "eval_steps": "eval_every val_check_interval",
    "logging_steps": "log_every log_steps log_every_n_steps",
    "report_to": "logger loggers wandb tensorboard",
    "resume_from_checkpoint": "resume ckpt_path",
    "adamw_torch": "adam adamw",
    "reduce_lr_on_plateau": "plateau",
    "train_dataset": "dataset data",
    "data_collator": "collate_fn",
    "compute_loss_func": "loss_fn criterion",
}


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The member of `known` that means what `name` says, else the one most like it; None where nothing is similar."""
    known, word = list(known), name.lower().replace("-", "_")
    matches = [match for match in known if word in OTHER_WORDS.get(match, "").split()]
    matches = matches or get_close_matches(name, known, n=1) or get_close_matches(word, known, n=1)
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
