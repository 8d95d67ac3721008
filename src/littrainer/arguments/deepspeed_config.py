"""A DeepSpeed configuration: read, its "auto" values filled in from the arguments, and checked against them.

It is filled in twice, as its values become known: from the arguments when they are made, and once more when a training
begins, whose length and model only then stand. A value that follows from an argument stays with it: a script may set
the argument later.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from littrainer.arguments.json_values import parse_json_object, read_json_object

if TYPE_CHECKING:
    import torch

AUTO = "auto"
OFFLOADED_TO = ("cpu", "nvme")


class _FromArguments(NamedTuple):
    """A value of the configuration that training arguments say too.

    Parameters:
        key: its place, with dots between the sections.
        argument: what says so, for errors.
        value: takes the arguments and the micro-batch size of one process.
        has_to_match: whether another value than that is refused.
    """

    key: str
    argument: str
    value: Callable[[Any, int], Any]
    has_to_match: bool = True


FROM_ARGUMENTS = (
    _FromArguments("train_micro_batch_size_per_gpu", "per_device_train_batch_size", lambda args, size: size),
    _FromArguments(
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
        lambda args, size: args.gradient_accumulation_steps,
    ),
    _FromArguments(
        "train_batch_size",
        "world_size * per_device_train_batch_size * gradient_accumulation_steps",
        lambda args, size: args.world_size * size * args.gradient_accumulation_steps,
    ),
    _FromArguments("gradient_clipping", "max_grad_norm", lambda args, size: args.max_grad_norm),
    _FromArguments("optimizer.params.lr", "learning_rate", lambda args, size: args.learning_rate),
    _FromArguments(
        "optimizer.params.betas", "adam_beta1 and adam_beta2", lambda args, size: [args.adam_beta1, args.adam_beta2]
    ),
    _FromArguments("optimizer.params.eps", "adam_epsilon", lambda args, size: args.adam_epsilon),
    _FromArguments("optimizer.params.weight_decay", "weight_decay", lambda args, size: args.weight_decay),
    _FromArguments("scheduler.params.warmup_min_lr", "0", lambda args, size: 0, has_to_match=False),
    _FromArguments("scheduler.params.warmup_max_lr", "learning_rate", lambda args, size: args.learning_rate),
    _FromArguments("fp16.enabled", "fp16 or fp16_full_eval", lambda args, size: bool(args.fp16 or args.fp16_full_eval)),
    _FromArguments("bf16.enabled", "bf16 or bf16_full_eval", lambda args, size: bool(args.bf16 or args.bf16_full_eval)),
)
BATCH_SIZES = ("train_micro_batch_size_per_gpu", "train_batch_size")

# Key -> what says so, and its value from the arguments and the optimizer steps of the training.
FROM_LENGTH: dict[str, tuple[str, Callable[[Any, int], int]]] = {
    "scheduler.params.total_num_steps": ("optimizer steps of the training", lambda args, steps: steps),
    # DeepSpeed refuses a warmup of no step.
    "scheduler.params.warmup_num_steps": ("warmup_steps", lambda args, steps: max(1, args.get_warmup_steps(steps))),
}

# Key -> its value for a model of that hidden size, and whether stage 3 alone has it.
FROM_HIDDEN_SIZE: dict[str, tuple[Callable[[int], int], bool]] = {
    "zero_optimization.reduce_bucket_size": (lambda size: size * size, False),
    "zero_optimization.stage3_prefetch_bucket_size": (lambda size: int(0.9 * size * size), True),
    "zero_optimization.stage3_param_persistence_threshold": (lambda size: 10 * size, True),
}

# What no argument says: key -> its value where "auto" stands.
WITHOUT_AN_ARGUMENT: dict[str, Any] = {
    "zero_optimization.stage": 2,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_optimizer.nvme_path": None,
    "zero_optimization.offload_param.nvme_path": None,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}


class DeepSpeedConfig:
    """What DeepSpeed is to do, with the names that libraries ask transformers' object of this kind by.

    Parameters:
        config_file_or_dict: the configuration as a dict (which is not changed), the path of a JSON file, JSON text, or
            that text in base64.

    Raises:
        ValueError: it is none of these, or has no section `zero_optimization`.
    """

    def __init__(self, config_file_or_dict: Any):
        # As it was given: arguments that are changed later mean another one.
        self.given: Any = copy.deepcopy(config_file_or_dict)
        self.config: dict[str, Any] = read_config(config_file_or_dict)
        self.mismatches: list[str] = []
        # Values that follow from arguments, as they were filled in.
        self._filled: dict[str, Any] = {}
        if not isinstance(self.config.get("zero_optimization"), dict):
            raise ValueError(
                'deepspeed: the configuration has no section "zero_optimization". Add one, with "stage": 0 to shard '
                "nothing."
            )
        for key, value in WITHOUT_AN_ARGUMENT.items():
            self.fill_only(key, value)
        self.set_stage_and_offload()

    # ---- Asking ------------------------------------------------------------------------------------------------------

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section that a key with dots stands in, None where there is none, and the key within it."""
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if not isinstance(node, dict):
                return None, key
        return node, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value at a key with dots, or `default`."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the value is there and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the value is there and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value still has to be filled in."""
        return self.get_value(ds_key_long) == AUTO

    def set_stage_and_offload(self) -> None:
        """Look again at the stage of ZeRO, and at where it keeps optimizer and parameters."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        places = {self.get_value(f"zero_optimization.{part}.device") for part in ("offload_optimizer", "offload_param")}
        self._offload = self._stage in (2, 3) and not places.isdisjoint(OFFLOADED_TO)

    def is_zero2(self) -> bool:
        """Whether optimizer states and gradients are sharded."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Whether parameters are sharded too."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Whether optimizer or parameters lie on the host or on a disk."""
        return self._offload

    def dtype(self) -> torch.dtype:
        """What the engine computes in."""
        import torch

        if self.is_true("bf16.enabled"):
            return torch.bfloat16
        return torch.float16 if self.is_true("fp16.enabled") else torch.float32

    # ---- Filling in --------------------------------------------------------------------------------------------------

    def fill_match(self, ds_key_long: str, hf_val: Any, hf_key: str | None = None, must_match: bool = True) -> None:
        """Fill in a value that is "auto", and note where another one stands than the arguments say.

        Parameters:
            ds_key_long: key of the value, with dots.
            hf_val: what the arguments say.
            hf_key: the argument that says so.
            must_match: whether another value is noted in `mismatches`.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is None:
            return
        value = node.get(key)
        if value == AUTO or (ds_key_long in self._filled and value == self._filled[ds_key_long]):
            node[key] = self._filled[ds_key_long] = hf_val
        elif must_match and value is not None and _as_in_json(value) != _as_in_json(hf_val):
            self.mismatches.append(f"deepspeed {ds_key_long}={value!r}, and {hf_key}={hf_val!r}")

    def fill_only(self, ds_key_long: str, hf_val: Any, hf_key: str | None = None) -> None:
        """Fill in a value that is "auto"."""
        self.fill_match(ds_key_long, hf_val, hf_key, must_match=False)

    def trainer_config_process(
        self, args: Any, auto_find_batch_size: bool = False, micro_batch_size: int | None = None
    ) -> None:
        """Fill in what training arguments say.

        Parameters:
            args: training arguments.
            auto_find_batch_size: the size of a micro-batch is looked for, so another one in here is none to refuse.
            micro_batch_size: samples of one process in a micro-batch; by default as the arguments say.
        """
        self.mismatches = []
        size = args.per_device_train_batch_size if micro_batch_size is None else micro_batch_size
        for key, argument, value, has_to_match in FROM_ARGUMENTS:
            must_match = has_to_match and not (auto_find_batch_size and key in BATCH_SIZES)
            self.fill_match(key, value(args, size), argument, must_match)
        if args.save_on_each_node:
            self.config.setdefault("checkpoint", {})["use_node_local_storage"] = True
        self._add_what_is_left_out(args, size)

    def _add_what_is_left_out(self, args: Any, micro_batch_size: int) -> None:
        # DeepSpeed needs two of the three sizes, and takes 1 for what it is not told.
        for key, value in {
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "train_micro_batch_size_per_gpu": micro_batch_size,
        }.items():
            if self.config.setdefault(key, value) == value and key not in self._filled:
                self._filled[key] = value
        # Nothing is printed at intervals of DeepSpeed's own.
        self.config["steps_per_print"] = float("inf")
        self.set_mixed_precision(args.mixed_precision)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Let the engine compute in what the arguments ask for, where the configuration has no section about it.

        Parameters:
            mixed_precision: `no`, `bf16` or `fp16`.
        """
        sections: dict[str, dict[str, Any]] = {"fp16": {"enabled": True, "auto_cast": True}, "bf16": {"enabled": True}}
        for name, enabled in sections.items():
            section = self.config.setdefault(name, enabled if name == mixed_precision else {"enabled": False})
            if section.get("enabled") == AUTO:
                section["enabled"] = name == mixed_precision

    def trainer_config_finalize(self, args: Any, model: Any, num_training_steps: int) -> None:
        """Fill in what only a training that begins says, and refuse what contradicts itself.

        Parameters:
            args: training arguments.
            model: the model, whose configuration names its hidden size.
            num_training_steps: optimizer steps of the training.

        Raises:
            ValueError: values that differ from the arguments, all of them; or that nothing fills in.
        """
        self._fill_from_hidden_size(model)
        for key, (source, value) in FROM_LENGTH.items():
            self.fill_match(key, value(args, num_training_steps), source)
        if self.mismatches:
            raise ValueError(
                f"The DeepSpeed configuration contradicts the arguments: {'; '.join(self.mismatches)}. Change one of "
                'the two, or write "auto" in the configuration, and the argument counts.'
            )
        unknown = [key for key, value in _entries(self.config) if value == AUTO]
        if unknown:
            raise ValueError(
                f'The DeepSpeed configuration has "auto" where no argument says the value: {", ".join(unknown)}. '
                "Write the value."
            )

    def _fill_from_hidden_size(self, model: Any) -> None:
        keys = [key for key in FROM_HIDDEN_SIZE if self.is_auto(key)]
        if not keys:
            return
        size = hidden_size_of(model)
        if size is None:
            raise ValueError(
                f'The DeepSpeed configuration has "auto" for {", ".join(keys)}, which follow from the hidden size, and '
                f"the config of {type(model).__name__} has neither `hidden_size` nor `hidden_sizes`. Write numbers."
            )
        for key, (value, only_in_stage_3) in FROM_HIDDEN_SIZE.items():
            if self.is_zero3() or not only_in_stage_3:
                self.fill_only(key, value(size))
            elif self.is_auto(key):
                # It has no effect in this stage, and DeepSpeed would take no text for it.
                self.del_config_sub_tree(key)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Take a section or a value out.

        Raises:
            ValueError: it is not there, and has to be.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ValueError(f"The DeepSpeed configuration has no {ds_key_long}: {self.config}.")


def read_config(given: Any) -> dict[str, Any]:
    """The configuration as a dict of its own.

    Parameters:
        given: a dict, the path of a JSON file, JSON text, or that text in base64.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(given, dict):
        return copy.deepcopy(given)
    text = os.fspath(given)
    if text.lstrip().startswith("{"):
        return parse_json_object(text, "deepspeed")
    if Path(text).exists():
        return read_json_object(text, f"deepspeed: the file {text}")
    try:
        decoded = json.loads(base64.urlsafe_b64decode(text.encode()))
    except (binascii.Error, ValueError):
        decoded = None
    if not isinstance(decoded, dict):
        raise ValueError(
            f"deepspeed: there is no file {text}. Give the path of a JSON file, or the configuration itself as a dict "
            "or as JSON text."
        )
    return decoded


def hidden_size_of(model: Any) -> int | None:
    """The hidden size in a model's config, the largest of several; None where it names none."""
    config: Any = getattr(model, "config", None)
    for place in (config, getattr(config, "text_config", None)):
        size = getattr(place, "hidden_size", None)
        if size is not None:
            return size
        sizes = getattr(place, "hidden_sizes", None)
        if sizes is not None:
            return max(sizes)
    return None


def _as_in_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _entries(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
