"""DeepSpeed's configuration and plugin."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from littrainer.arguments.json_values import read_mapping
from littrainer.distributed.environment import UNSET_VALUES, USE_DEEPSPEED, is_env_true

if TYPE_CHECKING:
    import torch


# Placeholder for values from arguments.
AUTO = "auto"
# Variables of `accelerate launch`.
PREFIX = "ACCELERATE_DEEPSPEED_"
CONFIG_FILE, ZERO3_INIT = f"{PREFIX}CONFIG_FILE", f"{PREFIX}ZERO3_INIT"
MOE_LAYERS = f"{PREFIX}MOE_LAYER_CLS_NAMES"


class Setting(NamedTuple):
    """Value of the configuration without a training argument.

    Parameters:
        name: attribute of the plugin, and suffix of `accelerate launch`'s variable.
        key: dotted path.
        launched: default of `accelerate launch`; None omits the key.
        default: value of the attribute if the configuration has none.
    """

    name: str
    key: str
    launched: Any = None
    default: Any = None

    @property
    def initial_value(self) -> Any:
        return self.default if self.launched is None else self.launched

    @property
    def variable(self) -> str:
        return f"{PREFIX if self.key.startswith('zero') else 'ACCELERATE_'}{self.name.upper()}"


SETTINGS = (
    Setting("zero_stage", "zero_optimization.stage", launched=2, default=0),
    Setting("offload_optimizer_device", "zero_optimization.offload_optimizer.device", default="none"),
    Setting("offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path"),
    Setting("offload_param_device", "zero_optimization.offload_param.device", default="none"),
    Setting("offload_param_nvme_path", "zero_optimization.offload_param.nvme_path"),
    Setting(
        "zero3_save_16bit_model",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        launched=False,
        default=False,
    ),
    Setting("gradient_accumulation_steps", "gradient_accumulation_steps", launched=AUTO, default=1),
    Setting("gradient_clipping", "gradient_clipping", launched=AUTO),
)
OFFLOAD_DEVICES = ("cpu", "nvme")

# Dotted key -> source for errors, and value by arguments and micro-batch size.
FROM_ARGUMENTS: dict[str, tuple[str, Callable[[Any, int], Any]]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", lambda args, size: size),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", lambda args, size: args.gradient_accumulation_steps),
    "train_batch_size": (
        "world_size * per_device_train_batch_size * gradient_accumulation_steps",
        lambda args, size: args.world_size * size * args.gradient_accumulation_steps,
    ),
    "gradient_clipping": ("max_grad_norm", lambda args, size: args.max_grad_norm),
    "optimizer.params.lr": ("learning_rate", lambda args, size: args.learning_rate),
    "optimizer.params.betas": ("adam_beta1 and adam_beta2", lambda args, size: [args.adam_beta1, args.adam_beta2]),
    "optimizer.params.eps": ("adam_epsilon", lambda args, size: args.adam_epsilon),
    "optimizer.params.weight_decay": ("weight_decay", lambda args, size: args.weight_decay),
    "scheduler.params.warmup_max_lr": ("learning_rate", lambda args, size: args.learning_rate),
    "fp16.enabled": ("fp16 or fp16_full_eval", lambda args, size: bool(args.fp16 or args.fp16_full_eval)),
    "bf16.enabled": ("bf16 or bf16_full_eval", lambda args, size: bool(args.bf16 or args.bf16_full_eval)),
}
BATCH_SIZES = ("train_micro_batch_size_per_gpu", "train_batch_size")

# Dotted key -> source for errors, and value by arguments and optimizer steps.
FROM_LENGTH: dict[str, tuple[str, Callable[[Any, int], int]]] = {
    "scheduler.params.total_num_steps": ("optimizer steps of the training", lambda args, steps: steps),
    # DeepSpeed rejects 0.
    "scheduler.params.warmup_num_steps": ("warmup_steps", lambda args, steps: max(1, args.get_warmup_steps(steps))),
}

# Dotted key -> value by hidden size, and whether it is for stage 3 only.
FROM_HIDDEN_SIZE: dict[str, tuple[Callable[[int], int], bool]] = {
    "zero_optimization.reduce_bucket_size": (lambda size: size * size, False),
    "zero_optimization.stage3_prefetch_bucket_size": (lambda size: int(0.9 * size * size), True),
    "zero_optimization.stage3_param_persistence_threshold": (lambda size: 10 * size, True),
}


class DeepSpeedConfig:
    """Substitute for transformers' HfTrainerDeepSpeedConfig.

    Parameters:
        config_file_or_dict: dict, path of a JSON file, or JSON text.

    Raises:
        ValueError: the value is invalid, or has no section `zero_optimization`.
    """

    def __init__(self, config_file_or_dict: Any):
        # Original, to detect arguments that change later.
        self.given: Any = copy.deepcopy(config_file_or_dict)
        self.config: dict[str, Any] = read_mapping(config_file_or_dict, "deepspeed")
        self.mismatches: list[str] = []
        # Dotted key -> value that was filled in.
        self._filled: dict[str, Any] = {}
        if not isinstance(self.config.get("zero_optimization"), dict):
            raise ValueError(
                'deepspeed: the configuration has no section "zero_optimization". Add one, with "stage": 0 to shard '
                "nothing."
            )
        for setting in SETTINGS:
            if setting.key.startswith("zero_optimization"):
                self.fill_only(setting.key, setting.initial_value)
        self.fill_only("scheduler.params.warmup_min_lr", 0)
        self.set_stage_and_offload()

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section of a dotted key, or None, and the last part of the key."""
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if not isinstance(node, dict):
                return None, key
        return node, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def is_true(self, ds_key_long: str) -> bool:
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether the value exists and is false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_auto(self, ds_key_long: str) -> bool:
        return self.get_value(ds_key_long) == AUTO

    def set_stage_and_offload(self) -> None:
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = {
            self.get_value(f"zero_optimization.{part}.device") for part in ("offload_optimizer", "offload_param")
        }
        self._offload = self._stage in (2, 3) and not devices.isdisjoint(OFFLOAD_DEVICES)

    def is_zero2(self) -> bool:
        return self._stage == 2

    def is_zero3(self) -> bool:
        return self._stage == 3

    def is_offload(self) -> bool:
        return self._offload

    def dtype(self) -> torch.dtype:
        import torch

        if self.is_true("bf16.enabled"):
            return torch.bfloat16
        return torch.float16 if self.is_true("fp16.enabled") else torch.float32

    def fill_match(self, ds_key_long: str, hf_val: Any, hf_key: str | None = None, must_match: bool = True) -> None:
        """Replace "auto" by the arguments' value, and record a value that differs but must match."""
        node, key = self.find_config_node(ds_key_long)
        if node is None:
            return
        value = node.get(key)
        if value == AUTO or (ds_key_long in self._filled and value == self._filled[ds_key_long]):
            node[key] = self._filled[ds_key_long] = hf_val
        elif must_match and value is not None and (list(value) if isinstance(value, tuple) else value) != hf_val:
            self.mismatches.append(f"deepspeed {ds_key_long}={value!r}, and {hf_key}={hf_val!r}")

    def fill_only(self, ds_key_long: str, hf_val: Any, hf_key: str | None = None) -> None:
        self.fill_match(ds_key_long, hf_val, hf_key, must_match=False)

    def trainer_config_process(
        self, args: Any, auto_find_batch_size: bool = False, micro_batch_size: int | None = None
    ) -> None:
        """Fill in the values of training arguments.

        Parameters:
            auto_find_batch_size: accept different batch sizes, since they change.
        """
        self.mismatches = []
        size = args.per_device_train_batch_size if micro_batch_size is None else micro_batch_size
        for key, (argument, value) in FROM_ARGUMENTS.items():
            self.fill_match(key, value(args, size), argument, not (auto_find_batch_size and key in BATCH_SIZES))
        if args.save_on_each_node:
            self.config.setdefault("checkpoint", {})["use_node_local_storage"] = True
        # DeepSpeed needs two of the three sizes; a missing size defaults to 1.
        for key, number in (
            ("gradient_accumulation_steps", args.gradient_accumulation_steps),
            ("train_micro_batch_size_per_gpu", size),
        ):
            if self.config.setdefault(key, number) == number:
                self._filled.setdefault(key, number)
        self.config["steps_per_print"] = float("inf")
        self.set_mixed_precision(args.mixed_precision)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the precision unless the configuration sets it."""
        sections: dict[str, dict[str, Any]] = {"fp16": {"enabled": True, "auto_cast": True}, "bf16": {"enabled": True}}
        for name, enabled in sections.items():
            section = self.config.setdefault(name, enabled if name == mixed_precision else {"enabled": False})
            if section.get("enabled") == AUTO:
                section["enabled"] = name == mixed_precision

    def trainer_config_finalize(self, args: Any, model: Any, num_training_steps: int) -> None:
        """Fill in the values that depend on the model and the length of the training.

        Raises:
            ValueError: values differ from the arguments, or are still "auto".
        """
        self._fill_from_hidden_size(model)
        for key, (source, value) in FROM_LENGTH.items():
            self.fill_match(key, value(args, num_training_steps), source)
        if self.mismatches:
            raise ValueError(
                f"The DeepSpeed configuration contradicts the arguments: {'; '.join(self.mismatches)}. Change one of "
                'the two, or write "auto" in the configuration, and the argument counts.'
            )
        unfilled = [key for key, value in _iterate_entries(self.config) if value == AUTO]
        if unfilled:
            raise ValueError(
                f'The DeepSpeed configuration has "auto" where no argument says the value: {", ".join(unfilled)}. '
                "Write the value."
            )

    def _fill_from_hidden_size(self, model: Any) -> None:
        keys = [key for key in FROM_HIDDEN_SIZE if self.is_auto(key)]
        if not keys:
            return
        size = get_hidden_size(model)
        if size is None:
            raise ValueError(
                f'The DeepSpeed configuration has "auto" for {", ".join(keys)}, which follow from the hidden size, and '
                f"the config of {type(model).__name__} has neither `hidden_size` nor `hidden_sizes`. Write numbers."
            )
        for key, (value, only_in_stage_3) in FROM_HIDDEN_SIZE.items():
            if self.is_zero3() or not only_in_stage_3:
                self.fill_only(key, value(size))
            elif self.is_auto(key):
                # Unused in this stage, and DeepSpeed rejects "auto".
                self.del_config_sub_tree(key)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a section or a value; raise ValueError if it must exist and is missing."""
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ValueError(f"The DeepSpeed configuration has no {ds_key_long}: {self.config}.")


def get_hidden_size(model: Any) -> int | None:
    config: Any = getattr(model, "config", None)
    for owner in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes"):
            size: Any = getattr(owner, name, None)
            if size is not None:
                return max(size) if isinstance(size, list | tuple) else size
    return None


def _iterate_entries(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _iterate_entries(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# ---- Plugin for libraries --------------------------------------------------------------------------------------------


class DeepSpeedPlugin:
    """Substitute for accelerate's DeepSpeedPlugin.

    Parameters:
        zero3_init: let `from_pretrained` shard models in stage 3.
    """

    def __init__(self, hf_ds_config: DeepSpeedConfig, zero3_init: bool = True):
        self.hf_ds_config = hf_ds_config
        self.zero3_init_flag: bool = hf_ds_config.is_zero3() and zero3_init
        self.transformer_moe_cls_names = os.environ.get(MOE_LAYERS)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        return self.hf_ds_config.config

    @deepspeed_config.setter
    def deepspeed_config(self, value: dict[str, Any]) -> None:
        self.hf_ds_config.config = value

    def __getattr__(self, name: str) -> Any:
        for setting in SETTINGS:
            if setting.name == name:
                return self.hf_ds_config.get_value(setting.key, setting.default)
        if name in ("get_value", "is_auto", "fill_match", "set_mixed_precision"):
            return getattr(self.hf_ds_config, name)
        raise AttributeError(f"the DeepSpeed plugin has no {name!r}; deepspeed_config is DeepSpeed's configuration.")

    def is_zero3_init_enabled(self) -> bool:
        return self.zero3_init_flag

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        previous = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = previous
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Register or unregister the configuration for `from_pretrained`, which shards models in stage 3."""
        with contextlib.suppress(ImportError):
            integration = importlib.import_module("transformers.integrations.deepspeed")
            if self.hf_ds_config.is_zero3() and not self.zero3_init_flag:
                integration.unset_hf_deepspeed_config()
            else:
                # transformers holds a weak reference.
                integration.set_hf_deepspeed_config(self.hf_ds_config)

    def select(self, _from_accelerator_state: bool = False) -> None:
        self.set_deepspeed_weakref()

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Mark expert modules as leaves, which DeepSpeed gathers at once."""
        if not self.transformer_moe_cls_names:
            return
        classes = {type(module).__name__: type(module) for module in model.modules()}
        names = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        missing = [name for name in names if name not in classes]
        if missing:
            raise ValueError(
                f"{MOE_LAYERS} names {', '.join(missing)}, and {type(model).__name__} has no module of that class."
            )
        utils: Any = importlib.import_module("deepspeed.utils")
        utils.set_z3_leaf_modules(model, [classes[name] for name in names])


def read_launcher_config() -> dict[str, Any] | str | None:
    """Return the configuration of `accelerate launch`, or its path; None without DeepSpeed."""
    if not is_env_true(USE_DEEPSPEED):
        return None
    file = os.environ.get(CONFIG_FILE, "")
    if file.lower() not in UNSET_VALUES:
        return file
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), AUTO)
    config: dict[str, Any] = {**sizes, "bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO}}
    for setting in SETTINGS:
        text = os.environ.get(setting.variable, "").strip()
        value = setting.launched if text.lower() in UNSET_VALUES else _parse_value(text)
        if value is not None:
            *sections, key = setting.key.split(".")
            node = config
            for section in sections:
                node = node.setdefault(section, {})
            node[key] = value
    return config


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def set_up_deepspeed(args: Any) -> None:
    launched = read_launcher_config()
    config = args.deepspeed or launched
    if not config:
        return
    _check_installed()
    adopt_config(
        args, DeepSpeedConfig(config), launched is None or not os.environ.get(ZERO3_INIT) or is_env_true(ZERO3_INIT)
    )
    if args.deepspeed_plugin.zero3_init_flag:
        from littrainer.distributed.group import start_deepspeed_communication

        start_deepspeed_communication(args)


def adopt_config(args: Any, config: DeepSpeedConfig, zero3_init: bool = True) -> None:
    config.trainer_config_process(args, args.auto_find_batch_size)
    args.hf_deepspeed_config, args.deepspeed_plugin = config, DeepSpeedPlugin(config, zero3_init)
    args.deepspeed_plugin.select()


def update_deepspeed(args: Any) -> None:
    """Apply a configuration or a plugin that a script has set on existing arguments."""
    plugin = args.deepspeed_plugin
    if plugin is not None and not isinstance(plugin, DeepSpeedPlugin):
        _check_installed()
        adopt_config(args, DeepSpeedConfig(plugin.deepspeed_config))
    elif args.deepspeed and (plugin is None or plugin.hf_ds_config.given != args.deepspeed):
        set_up_deepspeed(args)


def check_deepspeed_unchanged(args: Any, is_enabled: bool) -> None:
    """Raise ValueError if `deepspeed` has changed, or conflicts with other arguments."""
    plugin = args.deepspeed_plugin
    is_unchanged = plugin is not None and plugin.hf_ds_config.given == args.deepspeed
    if args.deepspeed and not (is_enabled and is_unchanged):
        raise ValueError(
            "`deepspeed` was set after the Trainer was made: set it in TrainingArguments, or at least before the "
            "Trainer is made."
        )
    if is_enabled and args.keep_optimizer_states is not None:
        raise ValueError(
            f"keep_optimizer_states={args.keep_optimizer_states} thins checkpoints to their weights, and DeepSpeed "
            "reads weights and optimizer from the same files: leave it unset, or set save_total_limit."
        )


def has_deepspeed(args: Any) -> bool:
    return getattr(args, "deepspeed_plugin", None) is not None


def _check_installed() -> None:
    if find_spec("deepspeed") is None:
        raise ImportError(
            "`deepspeed` is asked for, and DeepSpeed is not installed: run `pip install deepspeed`, or leave "
            f"`deepspeed` (and the environment variable {USE_DEEPSPEED}) unset."
        )
