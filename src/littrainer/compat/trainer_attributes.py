"""Each attribute that transformers' Trainer sets on itself: what it is here, or why it is not offered."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from littrainer.compat.accelerator.adoption import adopted
from littrainer.distributed.layout import tensor_parallel_size

if TYPE_CHECKING:
    from littrainer.training.reports import MemoryReport

ANSWERED: dict[str, str] = {
    "args": "the arguments",
    "model": "the user's model",
    "model_wrapped": "what steps call: the model, in DistributedDataParallel with several processes, compiled or "
    "wrapped by `_wrap_model`; the model itself otherwise",
    "model_init": "as given",
    "model_accepts_loss_kwargs": "whether forward takes `num_items_in_batch`; writable",
    "accelerator": "see above; an Accelerator of accelerate's own that is set here becomes one with its settings",
    "gather_function": "what evaluations gather with; writable for one loop",
    "data_collator": "the collator in use",
    "train_dataset": "as given; writable",
    "eval_dataset": "as given; writable",
    "processing_class": "as given; `tokenizer` is its earlier name",
    "compute_loss_func": "as given; writable",
    "compute_metrics": "as given; writable",
    "preprocess_logits_for_metrics": "as given",
    "optimizer": "None before training, then torch's optimizer itself: no wrapper is around it that has `.optimizer`; "
    "whether fp16 skipped its step says `accelerator.optimizer_step_was_skipped`",
    "lr_scheduler": "None before training, then torch's schedule itself",
    "optimizer_cls_and_kwargs": "as given",
    "callback_handler": "the callbacks, its `model`, `optimizer` and loaders current; may be replaced",
    "control": "the switches of the callbacks",
    "state": "where training stands",
    "label_names": "names of the labels in a batch; writable",
    "can_return_loss": "whether forward returns a loss without being told; writable",
    "label_smoother": "None, or what smooths the labels",
    "neftune_noise_alpha": "of the arguments",
    "neftune_hook_handle": "during a training with NEFTune, the handle that takes its hook off",
    "place_model_on_device": "whether the Trainer moves the model",
    "is_in_train": "whether `train()` is going on",
    "is_model_parallel": "whether a device map has put the model on other devices than `args.device`",
    "is_deepspeed_enabled": "whether DeepSpeed carries the training out",
    "is_fsdp_enabled": "whether FSDP shards the model",
    "is_fsdp_xla_enabled": "None",
    "is_fsdp_xla_v1_enabled": "None",
    "is_fsdp_xla_v2_enabled": "None",
    "is_tp_enabled": "whether processes compute each layer together (transformers 4)",
    "is_distributed_loading_by_transformers": "False",
    "deepspeed": "DeepSpeed's engine around the model, from the first training on; else None",
    "hub_model_id": "the repository's id, once it is created; else None",
    "push_in_progress": "the pushes of this Trainer, with `is_done()` and `wait_until_done()`; None before the first",
    "hp_space": "the space of the last search, or the one going on; else None",
    "hp_name": "what names the trials of that search, or None",
    "compute_objective": "what computes the objective of that search",
    "hp_search_backend": "what carries out the search that goes on; else None",
    "objective": "the objective of the trial at hand; None until it is evaluated",
    "model_preparation_time": "seconds that an evaluation before training took to prepare the model; else None",
    "current_flos": "operations since they were last moved into the state",
    "current_gradient_accumulation_steps": "micro-batches in the window at hand, also in an epoch's last one",
    "_train_batch_size": "micro-batch size of this process",
    "_signature_columns": "columns that forward takes; None until data is first trimmed to them; writable",
    "_eval_dataloaders": "loaders with persistent workers, by name",
    "_memory_tracker": "`start()` and `stop_and_update_metrics(metrics)` around an own `evaluate` or `predict`",
    "_loss_shifts_labels": "whether the loss predicts each label from the position before",
    "_created_lr_scheduler": "whether the schedule is the Trainer's own",
    "_loggers_initialized": "False",
    "_trial": "the trial of the last training",
    "_tr_loss": "loss summed since it was last logged",
    "_total_loss_scalar": "loss summed up to the last log",
    "_globalstep_last_logged": "optimizer step of the last log",
    "_initial_global_step": "optimizer step at which training began",
    "_initial_num_input_tokens_seen": "tokens seen when training began",
}
"""Attribute -> what it is. Those that begin with an underscore are read by subclasses all the same."""

REFUSED: dict[str, str] = {
    "_attn_mask_causal_checked": "sequences are not split between processes",
    "_mixed_mesh_grads": "looked for at each clipping: override `_has_mixed_mesh_grads`",
}
"""Attribute -> why it is not offered."""

STAGES = {"__init__": "init", "train": "train", "_inner_training_loop": "train", "evaluate": "eval", "predict": "test"}


class MemoryTracker:
    """What an overridden `evaluate` or `predict` calls to have its memory measured.

    Parameters:
        report: measures, if `skip_memory_metrics` is False.
        skips: the value of `skip_memory_metrics`.
    """

    def __init__(self, report: MemoryReport, skips: bool):
        self._report = report
        self.skip_memory_metrics = skips

    def start(self) -> None:
        """Begin to measure the method that calls this."""
        self._report.start(_stage_of_caller())

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """End the measurement and write what the method took into its metrics, in bytes."""
        self._report.stop(_stage_of_caller(), metrics)


def _stage_of_caller() -> str:
    name = sys._getframe(2).f_code.co_name
    return STAGES.get(name, name)


class TrainerAttributes:
    """Attributes of a Trainer that only subclasses and libraries read."""

    is_fsdp_xla_enabled: Any = None
    is_fsdp_xla_v1_enabled: Any = None
    is_fsdp_xla_v2_enabled: Any = None
    is_distributed_loading_by_transformers = False
    hub_model_id: str | None = None
    _hub_model_id_asked_for: tuple[str | None] | None = None
    push_in_progress: Any = None
    _loggers_initialized = False
    neftune_hook_handle: Any = None

    @property
    def accelerator(self: Any) -> Any:
        """What `create_accelerator_and_postprocess` or a script has set; accelerate's own becomes a facade like it."""
        try:
            return vars(self)["accelerator"]
        except KeyError:
            raise AttributeError("accelerator") from None

    @accelerator.setter
    def accelerator(self: Any, value: Any) -> None:
        vars(self)["accelerator"] = adopted(value, self.args, vars(self).get("accelerator"))

    @property
    def is_tp_enabled(self: Any) -> bool:
        """Whether processes compute each layer together."""
        return tensor_parallel_size(self.args) > 1

    @property
    def _memory_tracker(self: Any) -> MemoryTracker:
        return MemoryTracker(self._memory, self.args.skip_memory_metrics)


def missing_member_message(name: str) -> str:
    """Return what an AttributeError says for a name that the Trainer does not have."""
    if name in REFUSED:
        return f"littrainer's Trainer does not have {name}: {REFUSED[name]}."
    return f"'Trainer' object has no attribute {name!r}"


def documentation() -> str:
    """The table of docs/compatibility.md about a Trainer's attributes."""
    lines = ["| attribute of a Trainer | what it is |", "| --- | --- |"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in ANSWERED.items()]
    lines += ["", "| not offered | why |", "| --- | --- |"]
    lines += [f"| `{name}` | {reason} |" for name, reason in REFUSED.items()]
    return "\n".join(lines) + "\n"
