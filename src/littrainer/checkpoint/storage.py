"""How a checkpoint holds weights and the optimizer's state: whole, put together from shards, or as a strategy has them.

One class for each. Everything else in a checkpoint is the same whatever the strategy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from littrainer.arguments.deepspeed import asks_for_deepspeed
from littrainer.arguments.sharding import sharding_plan
from littrainer.checkpoint.layout import (
    FSDP_OPTIMIZER_NAME,
    FSDP_WEIGHTS_NAME,
    OPTIMIZER_FOLDER,
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_FOLDER,
    WEIGHTS_NAME,
    holds_parts,
)
from littrainer.checkpoint.reader import load_optimizer, read_optimizer_state, refuse_other_optimizer
from littrainer.checkpoint.weights import (
    Differences,
    adapter_weights,
    carries_adapters,
    fitted,
    holds_weights,
    load_weights,
    log_names_that_differ,
    other_shape,
    read_weights,
    refuse_other_weights,
)
from littrainer.checkpoint.writer import write_companions, write_files, write_parts
from littrainer.distributed.agreement import failing_together
from littrainer.errors.lazy_isinstance import is_a
from littrainer.model.facts import users_model
from littrainer.strategies.shards import (
    by_name,
    free_gathered,
    has_flat_shards,
    is_sharded,
    load_whole_optimizer_state,
    load_whole_state_dict,
    names_of_parameters,
    numbered_as_if_whole,
    numbered_for,
    whole_optimizer_state,
    whole_state_dict,
)

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

# What DeepSpeed's engine writes: each process its part of the optimizer's states, and in stage 3 of the parameters. It
# reads weights, optimizer and its own schedule from there; `zero_to_fp32.py` next to it makes whole weights of it.
ENGINE_FOLDERS = "global_step*"


@dataclass
class Trained:
    """What is trained, as it stands at this moment.

    Parameters:
        wrapped: the model with what the strategy has put around it.
        engine: DeepSpeed's, if it carries the training out.
        processing_class: what is written with the model.
        save: a Trainer's `_save`, which a subclass may override.
        tell: gets the names that the model or a file lacks, as torch's `load_state_dict` returns them.
    """

    args: TrainingArguments
    model: nn.Module
    optimizer: Any = None
    wrapped: nn.Module | None = None
    engine: Any = None
    processing_class: Any = None
    save: Callable[..., None] | None = None
    tell: Callable[[Any], None] = log_names_that_differ

    @property
    def as_sharded(self) -> nn.Module:
        """The model, in FSDP's first version with the wrapper that knows where its parameters are."""
        wrapped = self.wrapped
        return wrapped if wrapped is not None and is_a(wrapped, "flat sharded module") else self.model


class WholeStorage:
    """Each process has the whole model: those whose arguments say `should_save` write it, and all read it.

    All processes call each method at the same place. A method may wait for the others, and writes into a folder that
    may be another one in some process, from which its files are brought to the checkpoint.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained, self.args, self.optimizer = trained, trained.args, trained.optimizer

    @property
    def can_be_copied(self) -> bool:
        """Whether copies can be written later of what `save_model` and `save_optimizer` collect."""
        return not has_flat_shards(self.trained.as_sharded)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes what is put together from shards."""
        return self.args.process_index == 0

    def save_model(self, output_dir: str) -> None:
        """Write the model, as `save_model` does."""
        if self.args.should_save:
            self._save(output_dir)

    def _save(self, output_dir: str, **weights: Any) -> None:
        assert self.trained.save is not None
        self.trained.save(output_dir, **weights)

    def save_model_of_checkpoint(self, output_dir: str) -> None:
        """Write the model as a part of a checkpoint; by default as `save_model` writes it elsewhere."""
        self.save_model(output_dir)

    def save_optimizer(self, folder: Path) -> None:
        """Write the optimizer's state."""
        if self.args.should_save:
            write_files({OPTIMIZER_NAME: self.optimizer.state_dict()}, folder)

    def holds_weights(self, folder: Path) -> bool:
        """Return whether there are weights in a checkpoint that `load_model` reads."""
        return holds_weights(folder)

    def load_model(self, model: nn.Module, folder: Path, to_resume: bool) -> None:
        """Load the weights of a checkpoint.

        When training resumes this comes before the strategy has wrapped or sharded the model, and `load_optimizer`
        after it, so that a storage which can only load into shards does both there.
        """
        load_weights(model, folder, to_resume=to_resume, tell=self.trained.tell)

    def load_optimizer(self, folder: Path) -> None:
        """Load the optimizer's state; the model stands as it is trained."""
        load_optimizer(self.trained.model, self.optimizer, folder)


class WholeFromShards(WholeStorage):
    """Weights and optimizer state are spread over the processes, and whole in a checkpoint, like those of one process.

    They are put together in the first process, which writes them whatever `save_on_each_node` says, and sent to the
    others from it.
    """

    def save_model(self, output_dir: str) -> None:
        """Write the whole model."""
        model = self.trained.as_sharded
        weights = {"state_dict": whole_state_dict(model)} if is_sharded(model) else {}
        if self.is_first:
            self._save(output_dir, **weights)

    def save_optimizer(self, folder: Path) -> None:
        """Write the whole optimizer's state."""
        model = self.trained.model
        state = whole_optimizer_state(model, self.optimizer)
        if self.is_first:
            write_files({OPTIMIZER_NAME: numbered_as_if_whole(model, self.optimizer, state)}, folder)

    def load_model(self, model: nn.Module, folder: Path, to_resume: bool) -> None:
        """Load weights into the shards; only the first process reads them."""
        state: dict[str, Any] = {}
        with failing_together(f"reading the weights in {folder}"):
            if self.is_first:
                state = _whole_weights(model, folder, to_resume)
        load_whole_state_dict(model, state)

    def load_optimizer(self, folder: Path) -> None:
        """Load the optimizer's state into the shards; only the first process reads it."""
        self._load_whole_optimizer(self.trained.model, folder)

    def _load_whole_optimizer(self, model: nn.Module, folder: Path) -> None:
        state: dict[str, Any] = {}
        with failing_together(f"reading the optimizer's state in {folder}"):
            if self.is_first:
                path, state = read_optimizer_state(folder)
                refuse_other_optimizer(path, self.optimizer, numbered_for(model, self.optimizer, state))
        load_whole_optimizer_state(model, self.optimizer, state)


class FsdpStorage(WholeFromShards):
    """One file of weights and one of the optimizer's state (`FULL_STATE_DICT`), put together in the first process.

    Either form of FSDP is read whatever the form that is written, and so are checkpoints of trainings without FSDP.
    """

    def save_optimizer(self, folder: Path) -> None:
        """Write the weights as FSDP of transformers reads them, and the optimizer's state with names of parameters."""
        model = self.trained.as_sharded
        weights = _without_base(self.trained.model, whole_state_dict(model))
        if is_sharded(model):
            state = whole_optimizer_state(model, self.optimizer)
        else:
            state = by_name(self.optimizer.state_dict(), names_of_parameters(model, self.optimizer))
        if self.is_first:
            write_files({FSDP_WEIGHTS_NAME: weights, FSDP_OPTIMIZER_NAME: state}, folder)

    def load_model(self, model: nn.Module, folder: Path, to_resume: bool) -> None:
        """Load weights into the shards, or into a model that is not sharded yet.

        What each process has written its part of is read into shards; before there are any, `load_optimizer` does so.
        """
        has_parts = holds_parts(folder / WEIGHTS_FOLDER)
        if model is self.trained.model:
            model = self.trained.as_sharded
        if not is_sharded(model):
            plan = sharding_plan(self.args)
            # The others may get them when the model is sharded.
            reads_weights = self.is_first or plan is None or not plan.cpu_ram_efficient_loading
            if reads_weights and not (has_parts and to_resume):
                WholeStorage.load_model(self, model, folder, to_resume)
        elif has_parts and not has_flat_shards(model):
            _load_parts(model, folder / WEIGHTS_FOLDER, to_resume, self.trained.tell)
        else:
            super().load_model(model, folder, to_resume)

    def load_optimizer(self, folder: Path) -> None:
        """Load the optimizer's state, and weights that were left to be read into shards."""
        model, optimizer = self.trained.as_sharded, self.optimizer
        if holds_parts(folder / WEIGHTS_FOLDER):
            if is_sharded(model):
                self.load_model(model, folder, to_resume=True)
            else:
                load_weights(model, folder, to_resume=True, tell=self.trained.tell)
        if not is_sharded(model):
            load_optimizer(model, optimizer, folder)
        elif holds_parts(folder / OPTIMIZER_FOLDER) and not has_flat_shards(model):
            from littrainer.checkpoint.sharded_files import read_optimizer_into

            with failing_together(f"reading {folder / OPTIMIZER_FOLDER}"):
                state = read_optimizer_into(folder / OPTIMIZER_FOLDER, dict(model.named_parameters()))
                optimizer.load_state_dict(numbered_for(model, optimizer, state))
        else:
            self._load_whole_optimizer(model, folder)


class PartsStorage(FsdpStorage):
    """Weights and optimizer state of which each process writes its part (`SHARDED_STATE_DICT`).

    What `save_model` writes is whole, as `from_pretrained` needs it.
    """

    def save_model_of_checkpoint(self, output_dir: str) -> None:
        """Write all but the weights, which follow in parts."""
        if self.is_first:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            for name in ("config", "generation_config"):
                settings: Any = getattr(self.trained.model, name, None)
                if hasattr(settings, "save_pretrained"):
                    settings.save_pretrained(output_dir)
            write_companions(output_dir, self.args, self.trained.processing_class)

    def save_optimizer(self, folder: Path) -> None:
        """Write this process's part of weights and optimizer state."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        from littrainer.checkpoint.sharded_files import OPTIMIZER_KEY, WEIGHTS_KEY

        model, optimizer = self.trained.as_sharded, self.optimizer
        # Parts of version 2 are copied to the host's memory when they are written, or before training goes on.
        options = StateDictOptions(cpu_offload=has_flat_shards(model))
        free_gathered(model)
        weights = _without_base(self.trained.model, get_model_state_dict(model, options=options))
        state: Mapping[str, Any]
        if has_flat_shards(model):
            state = get_optimizer_state_dict(model, optimizer, options=options)
        else:
            state = by_name(optimizer.state_dict(), names_of_parameters(model, optimizer))
        write_parts({WEIGHTS_FOLDER: {WEIGHTS_KEY: weights}, OPTIMIZER_FOLDER: {OPTIMIZER_KEY: state}}, folder)


def _whole_weights(model: nn.Module, folder: Path, to_resume: bool) -> dict[str, Any]:
    if carries_adapters(users_model(model)) and not (folder / FSDP_WEIGHTS_NAME).is_file():
        return adapter_weights(users_model(model), folder)
    state, differences = fitted(model, read_weights(folder))
    refuse_other_weights(model, folder, differences, to_resume)
    return state


def _base_of_adapters(model: nn.Module) -> set[str]:
    """Return the names of weights that an adapter's checkpoint does not hold: its base, which nothing trains."""
    if not carries_adapters(users_model(model)):
        return set()
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _without_base(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    base = _base_of_adapters(model)
    return {name: value for name, value in weights.items() if name not in base}


def _load_parts(model: nn.Module, folder: Path, to_resume: bool, tell: Callable[[Any], None]) -> None:
    from littrainer.checkpoint.sharded_files import WEIGHTS_KEY, read_into, stored_weights

    free_gathered(model)
    with failing_together(f"reading {folder}"):
        own, stored, base = model.state_dict(), stored_weights(folder), _base_of_adapters(model)
        shapes = {name: (entry.size, own[name].shape) for name, entry in stored.items() if entry and name in own}
        differences = Differences(
            [name for name in own if name not in stored and name not in base],
            [name for name in stored if name not in own],
            [other_shape(name, *both) for name, both in shapes.items() if both[0] != both[1]],
        )
        refuse_other_weights(model, folder, differences, to_resume)
        read_into(folder, {f"{WEIGHTS_KEY}.{name}": value for name, value in own.items() if name in stored})
        # Of offloaded ones state_dict() gives copies, into which was read.
        result = model.load_state_dict(own, strict=False)
    tell(type(result)(differences.missing, differences.unexpected))


class EngineStorage(WholeStorage):
    """Weights and optimizer state as DeepSpeed's engine writes and reads them, in all processes together."""

    def save_model(self, output_dir: str) -> None:
        """Write the model. In stage 3 its weights are gathered if the configuration says so; else the engine's are."""
        config: Any = self.args.hf_deepspeed_config
        if not config.is_zero3():
            super().save_model(output_dir)
            return
        engine = self.trained.engine
        if engine.zero_gather_16bit_weights_on_model_save():
            weights = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=self._has_adapters())
            if weights is not None:
                self._save(output_dir, state_dict=weights)
            return
        logger.warning(
            "stage3_gather_16bit_weights_on_model_save is off, so the weights in %s are in the files of DeepSpeed's "
            "engine: run the zero_to_fp32.py next to them to get whole ones.",
            output_dir,
        )
        if self.args.should_save:
            self._save(output_dir, state_dict={})
            for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
                (Path(output_dir) / name).unlink(missing_ok=True)
        self.save_optimizer(Path(output_dir))

    def save_optimizer(self, folder: Path) -> None:
        """Let the engine write weights, optimizer and its own schedule."""
        self.trained.engine.save_checkpoint(str(folder), exclude_frozen_parameters=self._has_adapters())

    def holds_weights(self, folder: Path) -> bool:
        """Return whether the engine has written its folder."""
        return any(folder.glob(ENGINE_FOLDERS))

    def load_model(self, model: nn.Module, folder: Path, to_resume: bool) -> None:
        """Load the weights of the best model; those of a training that is resumed come with the optimizer's state."""
        if not to_resume:
            self.load_optimizer(folder)
        elif not self.holds_weights(folder):
            raise ValueError(
                f"{folder} has no folder {ENGINE_FOLDERS} of DeepSpeed's engine, so DeepSpeed cannot go on from it. "
                "Resume it without `deepspeed`, or load its model with from_pretrained and start a new training."
            )

    def load_optimizer(self, folder: Path) -> None:
        """Load weights, optimizer and the engine's own schedule."""
        path, _ = self.trained.engine.load_checkpoint(
            str(folder),
            load_module_strict=not self._has_adapters(),
            load_optimizer_states=True,
            load_lr_scheduler_states=True,
        )
        if path is None:
            raise ValueError(f"DeepSpeed could not load {folder}. Its log says why; resume from another checkpoint.")

    def _has_adapters(self) -> bool:
        return is_a(self.trained.model, "peft model")


def storage_of(trained: Trained) -> WholeStorage:
    """Return how checkpoints hold weights and the optimizer's state, as the strategy stands at this moment."""
    plan = sharding_plan(trained.args)
    kind = WholeStorage
    if asks_for_deepspeed(trained.args):
        kind = EngineStorage
    elif plan is not None:
        kind = PartsStorage if plan.saves_shards and is_sharded(trained.as_sharded) else FsdpStorage
    elif is_sharded(trained.model):
        kind = WholeFromShards
    return kind(trained)
