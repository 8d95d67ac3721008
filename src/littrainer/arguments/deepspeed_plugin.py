"""What libraries read of a run that DeepSpeed carries out: accelerate's plugin, as far as they touch it."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from littrainer.arguments.deepspeed_config import WITHOUT_AN_ARGUMENT, DeepSpeedConfig
from littrainer.distributed.environment import USE_DEEPSPEED, launcher_settings

MOE_LAYERS = "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"
# Attributes of the plugin that say where optimizer and parameters lie -> where the configuration has them.
PLACES = {
    f"{part}_{name}": f"zero_optimization.{part}.{name}"
    for part in ("offload_optimizer", "offload_param")
    for name in ("device", "nvme_path")
}
# Where transformers keeps a weak reference to the configuration, for `from_pretrained`.
TRANSFORMERS_REFERENCE = "transformers.integrations.deepspeed"


class DeepSpeedPlugin:
    """Stands where libraries expect accelerate's DeepSpeedPlugin.

    Parameters:
        hf_ds_config: the configuration.
        zero3_init: whether stage 3 shards models while `from_pretrained` loads them.
    """

    is_train_batch_min = True
    enable_msamp = False
    msamp_opt_level = "O1"

    def __init__(self, hf_ds_config: DeepSpeedConfig, zero3_init: bool = True):
        self.hf_ds_config = hf_ds_config
        # Whether models are sharded while they are loaded.
        self.zero3_init_flag: bool = hf_ds_config.is_zero3() and zero3_init
        self.transformer_moe_cls_names = os.environ.get(MOE_LAYERS)
        self._selected = False

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration as a dict; what is written into it counts."""
        return self.hf_ds_config.config

    @deepspeed_config.setter
    def deepspeed_config(self, value: dict[str, Any]) -> None:
        self.hf_ds_config.config = value

    @property
    def zero_stage(self) -> int:
        """0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
        return self.get_value("zero_optimization.stage", 0)

    @property
    def gradient_accumulation_steps(self) -> Any:
        """Micro-batches in an optimizer step."""
        return self.get_value("gradient_accumulation_steps", 1)

    @property
    def gradient_clipping(self) -> Any:
        """The largest norm that gradients keep."""
        return self.get_value("gradient_clipping")

    @property
    def zero3_save_16bit_model(self) -> bool:
        """Whether stage 3 gathers the weights of a model that is saved."""
        return bool(self.get_value("zero_optimization.stage3_gather_16bit_weights_on_model_save", False))

    def __getattr__(self, name: str) -> Any:
        if name in PLACES:
            return self.get_value(PLACES[name], WITHOUT_AN_ARGUMENT[PLACES[name]])
        raise AttributeError(f"the DeepSpeed plugin has no {name!r}; its deepspeed_config has what DeepSpeed is told.")

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value at a key with dots, or `default`."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value still has to be filled in."""
        return self.hf_ds_config.is_auto(ds_key_long)

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are sharded while they are loaded."""
        return self.zero3_init_flag

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Load models within the block sharded, or whole.

        Parameters:
            enable: whether they are sharded.
        """
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Let `from_pretrained` of transformers know the configuration."""
        if self.hf_ds_config.is_zero3() and not self.zero3_init_flag:
            forget_in_transformers()
        else:
            make_known_to_transformers(self.hf_ds_config)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Let the engine compute in `bf16` or `fp16`, or in neither (`no`)."""
        self.hf_ds_config.set_mixed_precision(mixed_precision)

    @property
    def selected(self) -> bool:
        """Whether this is the plugin of several that is in use."""
        return self._selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this the plugin in use."""
        self.set_deepspeed_weakref()
        self._selected = True

    def _unselect(self) -> None:
        self._selected = False

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Gather mixtures of experts as a whole, by the class names in `transformer_moe_cls_names`.

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


def set_up_deepspeed(args: Any) -> None:
    """Give arguments that ask for DeepSpeed their `hf_deepspeed_config` and `deepspeed_plugin`.

    Stage 3 shards a model while `from_pretrained` of transformers loads it, as long as the arguments live.

    Parameters:
        args: training arguments whose other fields are settled.

    Raises:
        ValueError: the configuration cannot be read.
        ImportError: DeepSpeed is not installed.
    """
    args.deepspeed_plugin = args.hf_deepspeed_config = None
    launched = launcher_settings()
    given = args.deepspeed or launched.get("deepspeed")
    if not given:
        return
    _check_installed()
    adopt_config(args, DeepSpeedConfig(given), launched.get("zero3_init", True))
    if args.deepspeed_plugin.zero3_init_flag:
        # `from_pretrained` gives each process its part.
        from littrainer.distributed.group import start_deepspeed_communication

        start_deepspeed_communication(args)


def adopt_config(args: Any, config: DeepSpeedConfig, zero3_init: bool = True) -> None:
    """Let a configuration be the one that arguments stand for."""
    config.trainer_config_process(args, args.auto_find_batch_size)
    args.hf_deepspeed_config, args.deepspeed_plugin = config, DeepSpeedPlugin(config, zero3_init)
    args.deepspeed_plugin.select()


def settle_deepspeed(args: Any) -> None:
    """Follow what a script has set since the arguments were made: another configuration, or accelerate's plugin."""
    plugin = args.deepspeed_plugin
    if plugin is not None and not isinstance(plugin, DeepSpeedPlugin):
        _check_installed()
        adopt_config(args, DeepSpeedConfig(plugin.deepspeed_config))
    elif args.deepspeed and (plugin is None or plugin.hf_ds_config.given != args.deepspeed):
        set_up_deepspeed(args)


def check_settled(args: Any, is_enabled: bool) -> None:
    """Refuse a `deepspeed` that was set after the Trainer was made.

    Parameters:
        is_enabled: whether the Trainer was made for DeepSpeed.

    Raises:
        ValueError: the arguments say something else.
    """
    plugin = args.deepspeed_plugin
    is_known = plugin is not None and plugin.hf_ds_config.given == args.deepspeed
    if args.deepspeed and not (is_enabled and is_known):
        raise ValueError(
            "`deepspeed` was set after the Trainer was made: set it in TrainingArguments, or at least before the "
            "Trainer is made."
        )


def asks_for_deepspeed(args: Any) -> bool:
    """Whether DeepSpeed carries out the training of these arguments."""
    return getattr(args, "deepspeed_plugin", None) is not None


def _check_installed() -> None:
    if find_spec("deepspeed") is None:
        raise ImportError(
            "`deepspeed` is asked for, and DeepSpeed is not installed: pip install littrainer[deepspeed], or leave "
            f"`deepspeed` (and the environment variable {USE_DEEPSPEED}) unset."
        )


def make_known_to_transformers(config: DeepSpeedConfig) -> None:
    """Let transformers, where it is installed, ask this configuration whether models are sharded as they are loaded."""
    with contextlib.suppress(ImportError):
        # It keeps a weak reference: when the arguments go, so does this.
        importlib.import_module(TRANSFORMERS_REFERENCE).set_hf_deepspeed_config(config)


def forget_in_transformers() -> None:
    """Let transformers load models whole."""
    with contextlib.suppress(ImportError):
        importlib.import_module(TRANSFORMERS_REFERENCE).unset_hf_deepspeed_config()
