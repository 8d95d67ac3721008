"""Saving and loading of weights and optimizer state, with a class for each way in which they are sharded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from littrainer.arguments.deepspeed import has_deepspeed
from littrainer.arguments.sharding import get_sharding_plan
from littrainer.checkpoint.layout import (
    FSDP_OPTIMIZER_NAME,
    FSDP_WEIGHTS_NAME,
    OPTIMIZER_FOLDER,
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_FOLDER,
    WEIGHTS_NAME,
    has_sharded_state,
)
from littrainer.checkpoint.reader import load_optimizer, read_optimizer_state, refuse_mismatched_optimizer
from littrainer.checkpoint.weights import (
    Differences,
    describe_shape_mismatch,
    has_adapters,
    has_weights,
    load_weights,
    log_key_mismatch,
    match_to_model,
    read_adapter_weights,
    read_weights,
    refuse_mismatched_weights,
)
from littrainer.checkpoint.writer import CheckpointWriter, write_tokenizer_and_args
from littrainer.distributed.collectives import raise_on_all_ranks
from littrainer.model.facts import unwrap_user_model
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.strategies.full_state import (
    convert_to_param_ids,
    convert_to_unsharded_param_ids,
    get_full_optimizer_state,
    get_full_state_dict,
    get_optimizer_parameter_names,
    has_flat_shards,
    is_sharded,
    key_by_name,
    load_full_optimizer_state,
    load_full_state_dict,
    reshard_gathered,
)

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

# Shards by DeepSpeed's engine; zero_to_fp32.py converts them to full weights.
ENGINE_FOLDERS = "global_step*"


@dataclass
class TrainingObjects:
    """The objects that a checkpoint saves or restores.

    Parameters:
        wrapped: the model with the strategy's wrappers.
        save: the Trainer's overridable `_save`.
    """

    args: TrainingArguments
    model: nn.Module
    optimizer: Any = None
    wrapped: nn.Module | None = None
    engine: Any = None
    processing_class: Any = None
    save: Callable[..., None] = lambda output_dir, state_dict=None: None
    on_key_mismatch: Callable[[Any], None] = log_key_mismatch
    get_writer: Callable[[Path], CheckpointWriter] = CheckpointWriter

    @property
    def sharded_model(self) -> nn.Module:
        """The model, or FSDP 1's wrapper, which has the parameters."""
        wrapped = self.wrapped
        return wrapped if wrapped is not None and is_a(wrapped, "flat sharded module") else self.model


class FullStateIO:
    """I/O of full models, written by processes with `args.should_save`; all processes call each method together."""

    def __init__(self, training: TrainingObjects) -> None:
        self.training, self.args, self.optimizer = training, training.args, training.optimizer

    @property
    def supports_async_save(self) -> bool:
        return not has_flat_shards(self.training.sharded_model)

    @property
    def is_rank_zero(self) -> bool:
        return self.args.process_index == 0

    def save_model(self, output_dir: str) -> None:
        if self.args.should_save:
            self.training.save(output_dir)

    def save_checkpoint_model(self, output_dir: str) -> None:
        self.save_model(output_dir)

    def save_training_state(self, folder: Path) -> None:
        if self.args.should_save:
            self._write({OPTIMIZER_NAME: self.optimizer.state_dict()}, folder)

    def _write(self, objects: dict[str, Any], folder: Path) -> None:
        self.training.get_writer(folder).write_objects(objects)

    def has_weights(self, folder: Path) -> bool:
        return has_weights(folder)

    def load_model(self, model: nn.Module, folder: Path, to_resume: bool) -> None:
        """Load the weights of a checkpoint.

        A resume calls this before the model is sharded, and `load_training_state` later, which loads weights that are
        stored as shards.
        """
        load_weights(model, folder, to_resume=to_resume, on_key_mismatch=self.training.on_key_mismatch)

    def load_training_state(self, folder: Path) -> None:
        load_optimizer(self.training.model, self.optimizer, folder)


class GatheredStateIO(FullStateIO):
    """I/O of sharded models with full checkpoints: rank 0 gathers and writes, reads and scatters."""

    def save_model(self, output_dir: str) -> None:
        model = self.training.sharded_model
        weights = {"state_dict": get_full_state_dict(model)} if is_sharded(model) else {}
        if self.is_rank_zero:
            self.training.save(output_dir, **weights)

    def save_training_state(self, folder: Path) -> None:
        model = self.training.model
        state = get_full_optimizer_state(model, self.optimizer)
        if self.is_rank_zero:
            self._write({OPTIMIZER_NAME: convert_to_unsharded_param_ids(model, self.optimizer, state)}, folder)

    def load_model(self, model: nn.Module, folder: Path, to_resume: bool) -> None:
        state: dict[str, Any] = {}
        with raise_on_all_ranks(f"reading the weights in {folder}"):
            inner = unwrap_user_model(model)
            if self.is_rank_zero and has_adapters(inner) and not (folder / FSDP_WEIGHTS_NAME).is_file():
                state = read_adapter_weights(inner, folder)
            elif self.is_rank_zero:
                state, differences = match_to_model(model, read_weights(folder))
                refuse_mismatched_weights(model, folder, differences, to_resume)
        load_full_state_dict(model, state)

    def load_training_state(self, folder: Path) -> None:
        self._load_gathered_optimizer(self.training.model, folder)

    def _load_gathered_optimizer(self, model: nn.Module, folder: Path) -> None:
        state: dict[str, Any] = {}
        with raise_on_all_ranks(f"reading the optimizer's state in {folder}"):
            if self.is_rank_zero:
                path, state = read_optimizer_state(folder)
                refuse_mismatched_optimizer(path, self.optimizer, convert_to_param_ids(model, self.optimizer, state))
        load_full_optimizer_state(model, self.optimizer, state)


class FsdpStateIO(GatheredStateIO):
    """I/O of FSDP's `FULL_STATE_DICT`, which also reads sharded and plain checkpoints."""

    def save_training_state(self, folder: Path) -> None:
        """Write weights and optimizer state, by parameter name, in transformers' FSDP files."""
        model = self.training.sharded_model
        weights = self._drop_adapter_base(get_full_state_dict(model))
        state = (
            get_full_optimizer_state(model, self.optimizer) if is_sharded(model) else self._get_named_optimizer_state()
        )
        if self.is_rank_zero:
            self._write({FSDP_WEIGHTS_NAME: weights, FSDP_OPTIMIZER_NAME: state}, folder)

    def load_model(self, model: nn.Module, folder: Path, to_resume: bool) -> None:
        """Load weights into the shards, or full weights into a model that is not sharded yet."""
        has_shards = has_sharded_state(folder / WEIGHTS_FOLDER)
        if model is self.training.model:
            model = self.training.sharded_model
        if not is_sharded(model):
            plan = get_sharding_plan(self.args)
            # With cpu_ram_efficient_loading only rank 0 reads weights; sharding the model distributes them later.
            reads_weights = self.is_rank_zero or plan is None or not plan.cpu_ram_efficient_loading
            if reads_weights and not (has_shards and to_resume):
                FullStateIO.load_model(self, model, folder, to_resume)
        elif has_shards and not has_flat_shards(model):
            self._load_shards(model, folder / WEIGHTS_FOLDER, to_resume)
        else:
            super().load_model(model, folder, to_resume)

    def load_training_state(self, folder: Path) -> None:
        model = self.training.sharded_model
        if has_sharded_state(folder / WEIGHTS_FOLDER):
            if is_sharded(model):
                self.load_model(model, folder, to_resume=True)
            else:
                FullStateIO.load_model(self, model, folder, to_resume=True)
        if not is_sharded(model):
            load_optimizer(model, self.optimizer, folder)
        elif has_sharded_state(folder / OPTIMIZER_FOLDER) and not has_flat_shards(model):
            from littrainer.checkpoint.sharded_files import load_optimizer_shards

            with raise_on_all_ranks(f"reading {folder / OPTIMIZER_FOLDER}"):
                state = load_optimizer_shards(folder / OPTIMIZER_FOLDER, dict(model.named_parameters()))
                self.optimizer.load_state_dict(convert_to_param_ids(model, self.optimizer, state))
        else:
            self._load_gathered_optimizer(model, folder)

    def _load_shards(self, model: nn.Module, folder: Path, to_resume: bool) -> None:
        from littrainer.checkpoint.sharded_files import WEIGHTS_KEY, load_into, read_tensor_metadata

        reshard_gathered(model)
        with raise_on_all_ranks(f"reading {folder}"):
            state, prefix = model.state_dict(), f"{WEIGHTS_KEY}."
            stored = {name.removeprefix(prefix): entry for name, entry in read_tensor_metadata(folder).items()}
            shapes = {
                name: (entry.size, state[name].shape) for name, entry in stored.items() if entry and name in state
            }
            differences = Differences(
                [name for name in self._drop_adapter_base(state) if name not in stored],
                [name for name in stored if name not in state],
                [describe_shape_mismatch(name, *pair) for name, pair in shapes.items() if pair[0] != pair[1]],
            )
            refuse_mismatched_weights(model, folder, differences, to_resume)
            load_into(folder, {f"{prefix}{name}": value for name, value in state.items() if name in stored})
            # `state_dict()` made copies of offloaded weights, so the values read must be loaded into the model.
            result = model.load_state_dict(state, strict=False)
        self.training.on_key_mismatch(type(result)(differences.missing, differences.unexpected))

    def _get_named_optimizer_state(self) -> dict[str, Any]:
        names = get_optimizer_parameter_names(self.training.sharded_model, self.optimizer)
        return key_by_name(self.optimizer.state_dict(), names)

    def _drop_adapter_base(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Drop the frozen weights under adapters, since checkpoints do not store them."""
        model = self.training.model
        if not has_adapters(unwrap_user_model(model)):
            return dict(weights)
        base = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        return {name: value for name, value in weights.items() if name not in base}


class ShardedStateIO(FsdpStateIO):
    """I/O of FSDP's `SHARDED_STATE_DICT`; `save_model` writes the full model, as `from_pretrained` needs it."""

    def save_checkpoint_model(self, output_dir: str) -> None:
        if self.is_rank_zero:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            for name in ("config", "generation_config"):
                settings: Any = getattr(self.training.model, name, None)
                if hasattr(settings, "save_pretrained"):
                    settings.save_pretrained(output_dir)
            write_tokenizer_and_args(output_dir, self.args, self.training.processing_class)

    def save_training_state(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        from littrainer.checkpoint.sharded_files import OPTIMIZER_KEY, WEIGHTS_KEY

        model = self.training.sharded_model
        # FSDP 1's shards are copied to the host now; FSDP 2's are copied later, by the write or by HostCopies.
        options = StateDictOptions(cpu_offload=has_flat_shards(model))
        reshard_gathered(model)
        weights = self._drop_adapter_base(get_model_state_dict(model, options=options))
        state: Mapping[str, Any]
        if has_flat_shards(model):
            state = get_optimizer_state_dict(model, self.optimizer, options=options)
        else:
            state = self._get_named_optimizer_state()
        shards = {WEIGHTS_FOLDER: {WEIGHTS_KEY: weights}, OPTIMIZER_FOLDER: {OPTIMIZER_KEY: state}}
        self.training.get_writer(folder).write_shards(shards)


class DeepSpeedStateIO(FullStateIO):
    """I/O by DeepSpeed's engine, in all processes together."""

    def save_model(self, output_dir: str) -> None:
        """Write the model; ZeRO 3 gathers its weights, or leaves them in the engine's shards if gathering is off."""
        config: Any = self.args.hf_deepspeed_config
        if not config.is_zero3():
            super().save_model(output_dir)
            return
        engine = self.training.engine
        if engine.zero_gather_16bit_weights_on_model_save():
            weights = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=self._has_adapters())
            if weights is not None:
                self.training.save(output_dir, state_dict=weights)
            return
        logger.warning(
            "stage3_gather_16bit_weights_on_model_save is off, so the weights in %s are in the files of DeepSpeed's "
            "engine: run the zero_to_fp32.py next to them to get full weights.",
            output_dir,
        )
        if self.args.should_save:
            self.training.save(output_dir, state_dict={})
            for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
                (Path(output_dir) / name).unlink(missing_ok=True)
        self.save_training_state(Path(output_dir))

    def save_training_state(self, folder: Path) -> None:
        self.training.engine.save_checkpoint(str(folder), exclude_frozen_parameters=self._has_adapters())

    def has_weights(self, folder: Path) -> bool:
        return any(folder.glob(ENGINE_FOLDERS))

    def load_model(self, model: nn.Module, folder: Path, to_resume: bool) -> None:
        """Load the best model's weights; a resume only looks for them, since `load_training_state` loads them."""
        if not to_resume:
            self.load_training_state(folder)
        elif not self.has_weights(folder):
            raise ValueError(
                f"{folder} has no folder {ENGINE_FOLDERS} of DeepSpeed's engine, so DeepSpeed cannot resume from it. "
                "Resume it without `deepspeed`, or load its model with from_pretrained and start a new training."
            )

    def load_training_state(self, folder: Path) -> None:
        """Load the engine's weights, optimizer and scheduler."""
        written = len(list(folder.glob(f"{ENGINE_FOLDERS}/*zero_pp_rank_*_optim_states.pt")))
        config: Any = self.args.hf_deepspeed_config
        if written not in (0, self.args.world_size) and not config.get_value("checkpoint.load_universal", False):
            raise ValueError(
                f"{folder} was written by {written} processes of DeepSpeed, and there are {self.args.world_size}. "
                f"Start {written} processes, or convert the folder by DeepSpeed's ds_to_universal.py and set "
                '"checkpoint": {"load_universal": true} in the configuration.'
            )
        path, _ = self.training.engine.load_checkpoint(
            str(folder),
            load_module_strict=not self._has_adapters(),
            load_optimizer_states=True,
            load_lr_scheduler_states=True,
        )
        if path is None:
            raise ValueError(f"DeepSpeed could not load {folder}. Its log says why; resume from another checkpoint.")

    def _has_adapters(self) -> bool:
        return is_a(self.training.model, "peft model")


def choose_state_io(training: TrainingObjects) -> FullStateIO:
    plan = get_sharding_plan(training.args)
    if has_deepspeed(training.args):
        return DeepSpeedStateIO(training)
    if plan is not None:
        writes_shards = plan.has_sharded_checkpoints and is_sharded(training.sharded_model)
        return ShardedStateIO(training) if writes_shards else FsdpStateIO(training)
    return GatheredStateIO(training) if is_sharded(training.model) else FullStateIO(training)
