"""The members of an accelerator that are settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from littrainer.arguments.accelerator_config import AcceleratorConfig

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class _Shared:
    """A setting of `args.accelerator_config`: written here, it counts for the loaders that are built from then on."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(instance.config, self.name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance.config, self.name, value)


class _Apart(_Shared):
    """A setting that begins as that of `args.accelerator_config` and is written here alone.

    Libraries write it between the loaders of training and evaluation, and then compare the arguments with the defaults
    for a model card. No loader of a single process reads it.
    """

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else vars(instance).get(self.name, getattr(instance.config, self.name))

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value


class LoaderSettings:
    """How loaders are built and batches dispatched, readable and writable.

    Parameters:
        args: the arguments whose `accelerator_config` and `data_seed` this shows.
    """

    split_batches = _Shared()
    dispatch_batches = _Shared()
    even_batches = _Apart()
    use_seedable_sampler = _Shared()
    non_blocking = _Shared()
    # Whether loaders keep a state of their own; littrainer's keep one in every checkpoint.
    use_stateful_dataloader = False

    def __init__(self, args: TrainingArguments):
        self.args = args

    @property
    def config(self) -> AcceleratorConfig:
        """The config of the arguments, whatever a script has set in its place."""
        config = AcceleratorConfig.from_argument(self.args.accelerator_config)
        self.args.accelerator_config = config
        return config

    @property
    def data_seed(self) -> int | None:
        """Seed of the order of the training data."""
        return self.args.data_seed

    def __repr__(self) -> str:
        return f"LoaderSettings({self.config}, data_seed={self.data_seed})"


class Settings:
    """What an accelerator says of its set-up; most of it is fixed, since Lightning decides."""

    dataloader_config: LoaderSettings
    device_placement = True
    project_dir: str | None = None
    logging_dir: str | None = None
    save_iteration = 0
    fp8_enabled = delayed_fp8_autocast = has_fp8_handler = has_lomo_optimizer = False
    # What a Trainer of transformers hands its accelerator none of.
    autocast_handler = scaler_handler = init_handler = profile_handler = None
    fp8_recipe_handler = ao_recipe_handler = te_recipe_handler = msamp_recipe_handler = None

    def __init__(self, args: TrainingArguments):
        self.dataloader_config = LoaderSettings(args)
        self.rng_types = ["generator"]
        self.flag_tensor: Any = None
        self.trackers: list[Any] = []
        self.log_with: list[Any] = []
        self.project_configuration = SimpleNamespace(
            project_dir=None,
            logging_dir=None,
            automatic_checkpoint_naming=False,
            total_limit=None,
            iteration=0,
            save_on_each_node=args.save_on_each_node,
        )

    @property
    def split_batches(self) -> bool:
        """Whether a batch is split over the processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process draws the batches of all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether all processes get equally many samples; writable."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the random order is seeded anew for each epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device are not waited for."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are torchdata's stateful ones."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def deepspeed_plugin(self) -> Any:
        """What DeepSpeed is told, where it carries the training out; else None."""
        return self.dataloader_config.args.deepspeed_plugin

    @property
    def multi_device(self) -> bool:
        """Whether several processes train on GPUs of their own."""
        args = self.dataloader_config.args
        return args.world_size > 1 and args.device.type != "cpu"

    @property
    def should_save_model(self: Any) -> bool:
        """Whether this process is one that writes models."""
        return self.is_local_main_process
