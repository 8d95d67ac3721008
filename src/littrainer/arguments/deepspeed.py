"""DeepSpeed's configuration: it is read, filled in from the arguments, checked, and shown to libraries."""

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


# A value that the training arguments fill in.
AUTO = "auto"
# Variables of `accelerate launch`.
PREFIX = "ACCELERATE_DEEPSPEED_"
CONFIG_FILE, ZERO3_INIT = f"{PREFIX}CONFIG_FILE", f"{PREFIX}ZERO3_INIT"
MOE_LAYERS = f"{PREFIX}MOE_LAYER_CLS_NAMES"


class Setting(NamedTuple):
    """A value of the configuration that no training argument decides.

    Parameters:
        name: the attribute of the plugin that libraries read, and the end of `accelerate launch`'s variable.
        key: place in the configuration, with dots between the sections.
        launched: value if such a launch does not set it; None leaves it out.
        default: value of the attribute if the configuration has none.
    """

    name: str
    key: str
    launched: Any = None
    default: Any = None

    @property
    def initial_value(self) -> Any:
        """The value of the key in a configuration that does not have it."""
        return self.default if self.launched is None else self.launched

    @property
    def variable(self) -> str:
        """The environment variable of `accelerate launch`."""
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

# Key, with dots between the sections -> what says the value, for errors, and the value from the arguments and the
# micro-batch size of one process. Another value in the configuration is refused.
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


class DeepSpeedConfig:
    """DeepSpeed's configuration, with the members of transformers' class of this kind.

    Parameters:
        config_file_or_dict: the configuration as a dict (which is not changed), the path of a JSON file, or JSON text.

    Raises:
        ValueError: it is none of these, or has no section `zero_optimization`.
    """

    def __init__(self, config_file_or_dict: Any):
        # As it was given: arguments that are changed later mean another one.
        self.given: Any = copy.deepcopy(config_file_or_dict)
        self.config: dict[str, Any] = read_mapping(config_file_or_dict, "deepspeed")
        self.mismatches: list[str] = []
        # Values that follow from arguments, as they were filled in.
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

    # ---- Asking ------------------------------------------------------------------------------------------------------

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section of a key with dots, None if there is none, and the key within it."""
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if not isinstance(node, dict):
                return None, key
        return node, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a key with dots, or `default`."""
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
        """Read the stage of ZeRO, and where it keeps optimizer and parameters."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        places = {self.get_value(f"zero_optimization.{part}.device") for part in ("offload_optimizer", "offload_param")}
        self._offload = self._stage in (2, 3) and not places.isdisjoint(OFFLOAD_DEVICES)

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
        """Return the number format that the engine computes in."""
        import torch

        if self.is_true("bf16.enabled"):
            return torch.bfloat16
        return torch.float16 if self.is_true("fp16.enabled") else torch.float32

    # ---- Filling in --------------------------------------------------------------------------------------------------

    def fill_match(self, ds_key_long: str, hf_val: Any, hf_key: str | None = None, must_match: bool = True) -> None:
        """Fill in a value that is "auto", and note one that differs from the arguments.

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
        elif must_match and value is not None and (list(value) if isinstance(value, tuple) else value) != hf_val:
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
            auto_find_batch_size: the size of a micro-batch changes, so another one is not noted.
            micro_batch_size: samples of one process in a micro-batch; by default as the arguments say.
        """
        self.mismatches = []
        size = args.per_device_train_batch_size if micro_batch_size is None else micro_batch_size
        for key, (argument, value) in FROM_ARGUMENTS.items():
            self.fill_match(key, value(args, size), argument, not (auto_find_batch_size and key in BATCH_SIZES))
        if args.save_on_each_node:
            self.config.setdefault("checkpoint", {})["use_node_local_storage"] = True
        # DeepSpeed needs two of the three sizes, and takes 1 for a missing one.
        for key, number in (
            ("gradient_accumulation_steps", args.gradient_accumulation_steps),
            ("train_micro_batch_size_per_gpu", size),
        ):
            if self.config.setdefault(key, number) == number:
                self._filled.setdefault(key, number)
        # DeepSpeed prints nothing in between.
        self.config["steps_per_print"] = float("inf")
        self.set_mixed_precision(args.mixed_precision)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Let the engine compute in what the arguments ask for, if the configuration has no section about it.

        Parameters:
            mixed_precision: `no`, `bf16` or `fp16`.
        """
        sections: dict[str, dict[str, Any]] = {"fp16": {"enabled": True, "auto_cast": True}, "bf16": {"enabled": True}}
        for name, enabled in sections.items():
            section = self.config.setdefault(name, enabled if name == mixed_precision else {"enabled": False})
            if section.get("enabled") == AUTO:
                section["enabled"] = name == mixed_precision

    def trainer_config_finalize(self, args: Any, model: Any, num_training_steps: int) -> None:
        """Fill in what is known when a training begins, and refuse what contradicts itself.

        Parameters:
            args: training arguments.
            model: the model, whose configuration names its hidden size.
            num_training_steps: optimizer steps of the training.

        Raises:
            ValueError: names all values that differ from the arguments, or that nothing fills in.
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
                # The value has no effect in this stage, and DeepSpeed refuses text.
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


def hidden_size_of(model: Any) -> int | None:
    """Return the hidden size in a model's config, the largest of several; None if it names none."""
    config: Any = getattr(model, "config", None)
    for owner in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes"):
            size: Any = getattr(owner, name, None)
            if size is not None:
                return max(size) if isinstance(size, list | tuple) else size
    return None


def _entries(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# ---- What libraries read ---------------------------------------------------------------------------------------------


class DeepSpeedPlugin:
    """Takes the place of accelerate's DeepSpeedPlugin, for libraries.

    Parameters:
        hf_ds_config: the configuration; changes of its dict, `deepspeed_config`, count.
        zero3_init: whether stage 3 shards models while `from_pretrained` loads them.
    """

    def __init__(self, hf_ds_config: DeepSpeedConfig, zero3_init: bool = True):
        self.hf_ds_config = hf_ds_config
        self.zero3_init_flag: bool = hf_ds_config.is_zero3() and zero3_init
        self.transformer_moe_cls_names = os.environ.get(MOE_LAYERS)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration as a dict."""
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
        """Whether models are sharded while they are loaded."""
        return self.zero3_init_flag

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Choose whether models that are loaded within the block are sharded."""
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Let `from_pretrained` of transformers, if it is installed, know whether to shard models as it loads them."""
        with contextlib.suppress(ImportError):
            integration = importlib.import_module("transformers.integrations.deepspeed")
            if self.hf_ds_config.is_zero3() and not self.zero3_init_flag:
                integration.unset_hf_deepspeed_config()
            else:
                # transformers keeps a weak reference, which ends with the arguments.
                integration.set_hf_deepspeed_config(self.hf_ds_config)

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this the plugin in use."""
        self.set_deepspeed_weakref()

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Let DeepSpeed gather each mixture of experts as a whole; `transformer_moe_cls_names` names the classes.

        Raises:
            ValueError: the model has no module of such a class.
        """
        if not self.transformer_moe_cls_names:
            return
        classes = {type(module).__name__: type(module) for module in model.modules()}
        wanted = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        missing = [name for name in wanted if name not in classes]
        if missing:
            raise ValueError(
                f"{MOE_LAYERS} names {', '.join(missing)}, and {type(model).__name__} has no module of that class."
            )
        set_leaves: Any = importlib.import_module("deepspeed.utils").set_z3_leaf_modules
        set_leaves(model, [classes[name] for name in wanted])


def read_launcher_config() -> dict[str, Any] | str | None:
    """Return the configuration that `accelerate launch` asks for, or the path of its file; None without DeepSpeed."""
    if not is_env_true(USE_DEEPSPEED):
        return None
    file = os.environ.get(CONFIG_FILE, "")
    if file.lower() not in UNSET_VALUES:
        return file
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), AUTO)
    config: dict[str, Any] = {**sizes, "bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO}}
    for setting in SETTINGS:
        text = os.environ.get(setting.variable, "").strip()
        value = setting.launched if text.lower() in UNSET_VALUES else _read_value(text)
        if value is not None:
            *sections, key = setting.key.split(".")
            node = config
            for section in sections:
                node = node.setdefault(section, {})
            node[key] = value
    return config


def _read_value(text: str) -> Any:
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def set_up_deepspeed(args: Any) -> None:
    """Give arguments that ask for DeepSpeed their `hf_deepspeed_config` and `deepspeed_plugin`.

    While the arguments live, `from_pretrained` of transformers shards models in stage 3.
    """
    launched = read_launcher_config()
    config = args.deepspeed or launched
    if not config:
        return
    _check_installed()
    adopt_config(
        args, DeepSpeedConfig(config), launched is None or not os.environ.get(ZERO3_INIT) or is_env_true(ZERO3_INIT)
    )
    if args.deepspeed_plugin.zero3_init_flag:
        # `from_pretrained` gives each process its shard.
        from littrainer.distributed.group import start_deepspeed_communication

        start_deepspeed_communication(args)


def adopt_config(args: Any, config: DeepSpeedConfig, zero3_init: bool = True) -> None:
    """Make a configuration that of the arguments."""
    config.trainer_config_process(args, args.auto_find_batch_size)
    args.hf_deepspeed_config, args.deepspeed_plugin = config, DeepSpeedPlugin(config, zero3_init)
    args.deepspeed_plugin.select()


def update_deepspeed(args: Any) -> None:
    """Read what a script has set since the arguments were made: another configuration, or accelerate's plugin."""
    plugin = args.deepspeed_plugin
    if plugin is not None and not isinstance(plugin, DeepSpeedPlugin):
        _check_installed()
        adopt_config(args, DeepSpeedConfig(plugin.deepspeed_config))
    elif args.deepspeed and (plugin is None or plugin.hf_ds_config.given != args.deepspeed):
        set_up_deepspeed(args)


def check_deepspeed_unchanged(args: Any, is_enabled: bool) -> None:
    """Refuse a `deepspeed` that was set after the Trainer was made, and `keep_optimizer_states` with it.

    Parameters:
        is_enabled: whether the Trainer was made for DeepSpeed.
    """
    plugin = args.deepspeed_plugin
    is_known = plugin is not None and plugin.hf_ds_config.given == args.deepspeed
    if args.deepspeed and not (is_enabled and is_known):
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
    """Whether DeepSpeed carries out the training of these arguments."""
    return getattr(args, "deepspeed_plugin", None) is not None


def _check_installed() -> None:
    if find_spec("deepspeed") is None:
        raise ImportError(
            "`deepspeed` is asked for, and DeepSpeed is not installed: run `pip install deepspeed`, or leave "
            f"`deepspeed` (and the environment variable {USE_DEEPSPEED}) unset."
        )
