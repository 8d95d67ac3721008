"""Subclasses of a Trainer that note how each of their overridden methods is called."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

OVERRIDE_POINTS: tuple[str, ...] = (
    "_validate_args",
    "create_accelerator_and_postprocess",
    "get_train_dataloader",
    "get_eval_dataloader",
    "get_test_dataloader",
    "num_examples",
    "_get_dataloader",
    "_get_train_sampler",
    "_get_eval_sampler",
    "_set_signature_columns_if_needed",
    "_remove_unused_columns",
    "_get_collator_with_removed_columns",
    "create_optimizer",
    "create_scheduler",
    "get_optimizer_cls_and_kwargs",
    "get_decay_parameter_names",
    "_get_learning_rate",
    "train",
    "_hp_search_setup",
    "_inner_training_loop",
    "_init_training_state",
    "_finalize_training",
    "_finish_current_push",
    "training_step",
    "compute_loss",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "_maybe_log_save_evaluate",
    "get_batch_samples",
    "_get_num_items_in_batch",
    "_prepare_input",
    "_prepare_inputs",
    "set_initial_training_values",
    "get_total_train_batch_size",
    "_wrap_model",
    "_track_num_input_tokens",
    "_clip_grad_norm",
    "_get_grad_norm",
    "evaluate",
    "evaluation_loop",
    "predict",
    "prediction_step",
    "_evaluate",
    "_report_to_hp_search",
    "_save_checkpoint",
    "_determine_best_metric",
    "_save_rng_state",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_load_from_checkpoint",
    "_load_best_model",
    "_load_rng_state",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_callback_state",
    "_issue_warnings_after_load",
    "save_model",
    "_save",
    "log",
    "store_flos",
    "floating_point_ops",
    "call_model_init",
    "is_local_process_zero",
    "is_world_process_zero",
    "_move_model_to_device",
    "add_callback",
)
"""Methods of transformers' Trainer (5.23.0) that it calls itself while one process trains, and that a subclass may
therefore override."""
OTHER_CALLS: dict[str, str] = {
    "_get_output_dir": "asked once more when a training begins, for the folder that it claims",
    "_update_auto_batch_size": "with auto_find_batch_size (tests/loop/test_out_of_memory.py)",
    "get_tp_size": "asked once, for the samples of an optimizer step (tests/loop/test_plan.py)",
    "get_cp_size": "asked once, for the samples of an optimizer step (tests/loop/test_plan.py)",
    "get_sp_size": "asked once, for the samples of an optimizer step (tests/loop/test_plan.py)",
    "_has_mixed_mesh_grads": "asked in several processes, at each clipping (tests/optim/test_stepping.py)",
    "_mixed_mesh_grad_norm": "where that says yes (tests/optim/test_stepping.py)",
    "_tune_save_checkpoint": "with Ray Tune, whose trials save for each other (tests/search/test_ray_backend.py)",
    "init_hf_repo": "with push_to_hub (tests/hub/test_overrides.py)",
    "create_model_card": "with push_to_hub (tests/hub/test_overrides.py)",
    "push_to_hub": "with push_to_hub (tests/hub/test_overrides.py)",
    "_push_from_checkpoint": "with push_to_hub (tests/hub/test_overrides.py)",
}
"""Further ones, which are not called as often as by transformers, or only with an argument of their own."""


class Calls:
    """The calls, in order: name, kinds of the positional arguments, kinds of the keywords."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]] = []

    def note(self, name: str, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.made.append(
            (name, tuple(map(kind, positional)), tuple((key, kind(value)) for key, value in sorted(keywords.items())))
        )

    def first_calls(self) -> list[str]:
        """The methods, in the order in which they were first called."""
        return list(dict.fromkeys(name for name, *_ in self.made))

    def group_by_method(self) -> dict[str, dict[str, int]]:
        """Method -> its calls written out -> how often it was called in that way."""
        counted: dict[str, Counter[str]] = {}
        for name, positional, keywords in self.made:
            written = ", ".join([*positional, *(f"{key}={value}" for key, value in keywords)])
            counted.setdefault(name, Counter())[f"({written})"] += 1
        return {name: dict(sorted(ways.items())) for name, ways in sorted(counted.items())}


def noting_trainer(Base: Any, names: Iterable[str], calls: Calls) -> Any:
    """A subclass that overrides the named methods; each notes its call and does what its parent does."""
    return type("NotingTrainer", (Base,), {name: _noting(Base, name, calls) for name in names})


def _noting(Base: Any, name: str, calls: Calls) -> Any:
    parent = getattr(Base, name)
    is_static = isinstance(_definition(Base, name), staticmethod)

    @functools.wraps(parent)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.note(name, args, kwargs)
        return parent(*args, **kwargs) if is_static else parent(self, *args, **kwargs)

    return method


def _definition(Base: Any, name: str) -> Any:
    return next(vars(base)[name] for base in Base.__mro__ if name in vars(base))


def kind(value: Any) -> str:
    """Return the kind of a value, in words that are equal on both sides."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value).__name__ if value is not None else "None"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {kind(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(dict.fromkeys(map(kind, value)))
        return f"{type(value).__name__} of {len(value)}: {shown}" if value else f"empty {type(value).__name__}"
    for cls, name in KINDS:
        if isinstance(value, cls):
            return name
    return "function" if callable(value) else type(value).__name__


KINDS: tuple[tuple[Any, str], ...] = (
    (nn.Module, "model"),
    (DataLoader, "loader"),
    (torch.optim.Optimizer, "optimizer"),
    (torch.device, "device"),
    (Iterator, "iterator"),
)
