"""How a checkpoint holds weights and the optimizer's state where each process has all of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from littrainer.arguments.sharding import sharding_plan
from littrainer.checkpoint.checksums import Seal
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
from littrainer.checkpoint.reader import (
    load_optimizer,
    optimizer_differences,
    read_optimizer_state,
    refuse_other_optimizer,
)
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.checkpoint.weights import (
    PEFT_PREFIX,
    adapter_folders,
    carries_adapters,
    fitted,
    holds_weights,
    load_weights,
    read_adapter,
    read_weights,
    refuse_other_weights,
    without_wrappers,
)
from littrainer.checkpoint.writer import write_companions, write_files
from littrainer.distributed.agreement import failing_together
from littrainer.distributed.layout import data_parallel_size
from littrainer.errors.lazy_isinstance import is_a
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
    from littrainer.trainer import Trainer


logger = logging.getLogger(__name__)


class WholeStorage:
    """Each process has the whole model: those whose arguments say `should_save` write it, and all read it.

    All processes call each method at the same place. A method may wait for the others, and writes into a folder that
    may be another one in some process, from which its files are brought to the checkpoint.
    """

    # Whether `weights` and `optimizer_state` give all that is written, so that a thread can write it from copies.
    can_be_copied = True

    def weights(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole model's weights where this process writes them; None lets the model's own be written."""
        return None

    def optimizer_state(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole optimizer's state where this process writes it, else None."""
        return trainer.optimizer.state_dict() if trainer.args.should_save else None

    def save_model(self, trainer: Trainer, output_dir: str) -> None:
        """Write the model, as `save_model` does; a subclass may have its own `_save`."""
        weights = self.weights(trainer)
        if trainer.args.should_save:
            if weights is None:
                trainer._save(output_dir)
            else:
                trainer._save(output_dir, state_dict=weights)

    def save_model_of_checkpoint(self, trainer: Trainer, output_dir: str) -> None:
        """Write the model as a part of a checkpoint; by default as `save_model` writes it elsewhere."""
        self.save_model(trainer, output_dir)

    def save_optimizer(self, trainer: Trainer, folder: Path, seal: Seal | None) -> None:
        """Write the optimizer's state."""
        state = self.optimizer_state(trainer)
        if state is not None:
            write_files({OPTIMIZER_NAME: state}, folder, seal)

    def holds_weights(self, folder: Path) -> bool:
        """Whether there are weights in a checkpoint that `load_model` reads."""
        return holds_weights(folder)

    def load_model(
        self, trainer: Trainer, model: nn.Module, folder: Path, to_resume: bool, tell: Callable[[Any], None]
    ) -> None:
        """Load the weights of a checkpoint.

        Where training is resumed this comes before the strategy has wrapped or sharded the model, and `load_optimizer`
        after it, so that a storage which can only load into shards does both there.

        Parameters:
            to_resume, tell: as `load_weights` has them.
        """
        load_weights(model, folder, to_resume=to_resume, tell=tell)

    def load_optimizer(self, trainer: Trainer, folder: Path) -> None:
        """Load the optimizer's state; the model stands as it is trained."""
        load_optimizer(trainer, folder)


class WholeFromShards(WholeStorage):
    """Weights and optimizer state are spread over the processes, and whole in a checkpoint, like those of one process.

    They are put together in the first process, which writes them, and sent to the others from it.
    """

    def weights(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole weights, in the first process."""
        weights = whole_state_dict(trainer.model)
        return weights if trainer.args.process_index == 0 else None

    def optimizer_state(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole optimizer's state, in the first process."""
        state = whole_optimizer_state(trainer.model, trainer.optimizer)
        if trainer.args.process_index != 0:
            return None
        return numbered_as_if_whole(trainer.model, trainer.optimizer, state)

    def save_model(self, trainer: Trainer, output_dir: str) -> None:
        """Write the model in the first process, whatever `save_on_each_node` says: no other has the weights."""
        weights = self.weights(trainer)
        if weights is not None:
            trainer._save(output_dir, state_dict=weights)

    def load_model(
        self, trainer: Trainer, model: nn.Module, folder: Path, to_resume: bool, tell: Callable[[Any], None]
    ) -> None:
        """Load weights into the shards; only the first process reads them."""
        state: dict[str, Any] = {}
        with failing_together(f"reading the weights in {folder}"):
            if trainer.args.process_index == 0:
                state, differences = fitted(model, read_weights(folder))
                refuse_other_weights(model, folder, differences, to_resume)
        load_whole_state_dict(model, state)

    def load_optimizer(self, trainer: Trainer, folder: Path) -> None:
        """Load the optimizer's state into the shards; only the first process reads it."""
        state: dict[str, Any] = {}
        with failing_together(f"reading {folder / OPTIMIZER_NAME}"):
            if trainer.args.process_index == 0:
                state = numbered_for(trainer.model, trainer.optimizer, load_tensors(folder / OPTIMIZER_NAME))
                refuse_other_optimizer(folder / OPTIMIZER_NAME, trainer, state)
        load_whole_optimizer_state(trainer.model, trainer.optimizer, state)


class FsdpStorage(WholeStorage):
    """One file of weights and one of the optimizer's state (`FULL_STATE_DICT`), put together in the first process.

    Either form is read whatever the form that is written, and so are checkpoints of trainings without FSDP.
    """

    can_be_copied = False

    def weights(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole weights, in the first process."""
        model = _as_sharded(trainer)
        if not is_sharded(model):
            return None
        weights = whole_state_dict(model)
        return weights if trainer.args.process_index == 0 else None

    def optimizer_state(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole optimizer's state with names of parameters, in the first process."""
        model = _as_sharded(trainer)
        if is_sharded(model):
            state = whole_optimizer_state(model, trainer.optimizer)
        else:
            state = by_name(trainer.optimizer.state_dict(), names_of_parameters(model, trainer.optimizer))
        return state if trainer.args.process_index == 0 else None

    def save_model(self, trainer: Trainer, output_dir: str) -> None:
        """Write the whole model in the first process, whatever `save_on_each_node` says: no other has the weights."""
        weights = self.weights(trainer)
        if trainer.args.process_index == 0:
            if weights is None:
                trainer._save(output_dir)
            else:
                trainer._save(output_dir, state_dict=weights)

    def save_optimizer(self, trainer: Trainer, folder: Path, seal: Seal | None) -> None:
        """Write the weights as FSDP of transformers reads them, and the optimizer's state."""
        weights, state = self._weights_to_resume(trainer), self.optimizer_state(trainer)
        if state is not None:
            write_files({FSDP_WEIGHTS_NAME: weights, FSDP_OPTIMIZER_NAME: state}, folder, seal)

    def _weights_to_resume(self, trainer: Trainer) -> dict[str, Any]:
        left_out = _left_out(trainer.model)
        weights = whole_state_dict(_as_sharded(trainer))
        return {name: value for name, value in weights.items() if name not in left_out}

    def holds_weights(self, folder: Path) -> bool:
        """Whether there are weights in any of the forms that are read."""
        return holds_weights(folder)

    def load_model(
        self, trainer: Trainer, model: nn.Module, folder: Path, to_resume: bool, tell: Callable[[Any], None]
    ) -> None:
        """Load weights into the shards, or into a model that is not sharded yet.

        What each process has written its part of is read into shards; before there are any, `load_optimizer` does so.
        """
        has_parts = holds_parts(folder / WEIGHTS_FOLDER)
        if model is trainer.model:
            model = _as_sharded(trainer)
        if is_sharded(model):
            if has_parts and not has_flat_shards(model):
                _load_parts(model, folder / WEIGHTS_FOLDER, to_resume, tell)
            else:
                _load_whole(trainer, model, folder, to_resume, tell)
        elif not (has_parts and to_resume) and _reads_weights(trainer):
            load_weights(model, folder, to_resume=to_resume, tell=tell)

    def load_optimizer(self, trainer: Trainer, folder: Path) -> None:
        """Load the optimizer's state, and weights that were left to be read into shards."""
        model, optimizer = _as_sharded(trainer), trainer.optimizer
        if holds_parts(folder / WEIGHTS_FOLDER):
            if is_sharded(model):
                self.load_model(trainer, model, folder, True, trainer._issue_warnings_after_load)
            else:
                load_weights(model, folder, to_resume=True, tell=trainer._issue_warnings_after_load)
        if not is_sharded(model):
            super().load_optimizer(trainer, folder)
        elif holds_parts(folder / OPTIMIZER_FOLDER) and not has_flat_shards(model):
            from littrainer.checkpoint.sharded_files import read_optimizer_into

            with failing_together(f"reading {folder / OPTIMIZER_FOLDER}"):
                state = read_optimizer_into(folder / OPTIMIZER_FOLDER, dict(model.named_parameters()))
                optimizer.load_state_dict(numbered_for(model, optimizer, state))
        else:
            whole: dict[str, Any] = {}
            with failing_together(f"reading the optimizer's state in {folder}"):
                if trainer.args.process_index == 0:
                    path, whole = read_optimizer_state(folder)
                    _refuse_other_optimizer(path, model, optimizer, whole)
            load_whole_optimizer_state(model, optimizer, whole)


class PartsStorage(FsdpStorage):
    """Weights and optimizer state of which each process writes its part (`SHARDED_STATE_DICT`).

    What `save_model` writes is whole, as `from_pretrained` needs it.
    """

    def save_model_of_checkpoint(self, trainer: Trainer, output_dir: str) -> None:
        """Write what lies beside the weights; these follow in parts."""
        if trainer.args.process_index == 0:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            for name in ("config", "generation_config"):
                settings: Any = getattr(trainer.model, name, None)
                if hasattr(settings, "save_pretrained"):
                    settings.save_pretrained(output_dir)
            write_companions(trainer, output_dir)

    def save_optimizer(self, trainer: Trainer, folder: Path, seal: Seal | None) -> None:
        """Write this process's part of weights and optimizer state."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        from littrainer.checkpoint.sharded_files import OPTIMIZER_KEY, WEIGHTS_KEY, write_parts

        model = _as_sharded(trainer)
        free_gathered(model)
        left_out = _left_out(trainer.model)
        weights = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
        weights = {name: value for name, value in weights.items() if name not in left_out}
        write_parts(folder / WEIGHTS_FOLDER, {WEIGHTS_KEY: weights})
        write_parts(folder / OPTIMIZER_FOLDER, {OPTIMIZER_KEY: _parts_of_optimizer(model, trainer.optimizer)})


def saves_parts(trainer: Trainer) -> bool:
    """Whether the arguments ask for checkpoints in parts, and there are parts."""
    plan = sharding_plan(trainer.args) if trainer.is_fsdp_enabled else None
    return plan is not None and plan.saves_shards and is_sharded(_as_sharded(trainer))


def _as_sharded(trainer: Trainer) -> nn.Module:
    """The Trainer's model, in version 1 with the wrapper that knows where its parameters are."""
    wrapped = trainer.model_wrapped
    return wrapped if is_a(wrapped, "flat sharded module") else trainer.model


def _parts_of_optimizer(model: nn.Module, optimizer: Any) -> Mapping[str, Any]:
    if not has_flat_shards(model):
        return by_name(optimizer.state_dict(), names_of_parameters(model, optimizer))
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))


def _left_out(model: nn.Module) -> set[str]:
    """Names of weights that a checkpoint of an adapter does not hold: those of its base, which nothing trains."""
    if not carries_adapters(without_wrappers(model)):
        return set()
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _reads_weights(trainer: Trainer) -> bool:
    # The others get them when the model is sharded.
    plan = sharding_plan(trainer.args)
    return trainer.args.process_index == 0 or plan is None or not plan.cpu_ram_efficient_loading


def _load_parts(model: nn.Module, folder: Path, to_resume: bool, tell: Callable[[Any], None]) -> None:
    from littrainer.checkpoint.sharded_files import read_weights_into

    free_gathered(model)
    with failing_together(f"reading {folder}"):
        own = model.state_dict()
        missing, unexpected = read_weights_into(folder, own)
        left_out = _left_out(model)
        missing = [name for name in missing if name not in left_out]
        if to_resume and (missing or unexpected):
            raise RuntimeError(
                f"The weights in {folder} are not those of this model: {', '.join([*missing, *unexpected][:8])} "
                "are only on one side. Make the model as it was when the checkpoint was written."
            )
        # Offloaded and plain ones alike: what was read stands in copies where state_dict() gives such.
        result = model.load_state_dict(own, strict=False)
    tell(type(result)(missing, unexpected))


def _load_whole(trainer: Trainer, model: nn.Module, folder: Path, to_resume: bool, tell: Callable[[Any], None]) -> None:
    state: dict[str, Any] = {}
    with failing_together(f"reading the weights in {folder}"):
        if trainer.args.process_index == 0:
            if carries_adapters(without_wrappers(model)) and not (folder / FSDP_WEIGHTS_NAME).is_file():
                state = adapter_weights(without_wrappers(model), folder)
            else:
                from littrainer.checkpoint.sharded_files import read_fsdp_weights

                is_partial = carries_adapters(without_wrappers(model))
                stored = read_fsdp_weights(folder) if is_partial else read_weights(folder)
                state, differences = fitted(model, stored)
                refuse_other_weights(model, folder, differences, to_resume)
    load_whole_state_dict(model, state)


def adapter_weights(model: Any, folder: Path) -> dict[str, Any]:
    """The weights of a checkpoint's adapters under the names that they have in a model.

    Raises:
        ValueError: there are none, or the model has no such adapter.
    """
    own = [name for name, _ in model.named_parameters()]
    found: dict[str, Any] = {}
    for adapter in getattr(model, "peft_config", {}):
        place = adapter_folders(folder).get(adapter) or adapter_folders(folder).get("")
        if place is None:
            continue
        names = {
            name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", "."): name
            for name in own
            if f".{adapter}." in name
        }
        stored = read_adapter(place)
        # A model of transformers that carries an adapter has it in a file with the names of PEFT's wrapper.
        stored = {name if name in names else name.removeprefix(PEFT_PREFIX): value for name, value in stored.items()}
        others = [name for name in stored if name not in names]
        if others:
            raise ValueError(
                f"The adapter in {place} is not one of this model: it has {', '.join(others[:8])}. Make the model as "
                "it was when the checkpoint was written."
            )
        found.update({names[name]: value for name, value in stored.items()})
    if not found:
        raise ValueError(f"{folder} holds no adapter that this model has. Resume from another checkpoint.")
    return found


def _refuse_other_optimizer(path: Path, model: nn.Module, optimizer: Any, state: Any) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    numbered = numbered_for(model, optimizer, state) if isinstance(state, dict) else state
    differences = optimizer_differences(optimizer, numbered, names)
    if differences:
        raise ValueError(
            f"{path} does not fit the optimizer of this training: {'; '.join(differences)}. Set up model and "
            "arguments as they were when the checkpoint was written, or load its model and start a new training."
        )


ENGINE_FOLDERS = "global_step*"
# The file that names the folder to read.
LATEST_NAME = "latest"
PART_OF_PROCESS = re.compile(r".*zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")


class EngineStorage(WholeStorage):
    """Weights and optimizer state as DeepSpeed's engine writes and reads them, in all processes together."""

    optimizer_names = (LATEST_NAME,)
    can_be_copied = False

    def save_model(self, trainer: Trainer, output_dir: str) -> None:
        """Write the model. In stage 3 its weights are gathered if the configuration says so; else the engine's are."""
        config: Any = trainer.args.hf_deepspeed_config
        if not config.is_zero3():
            super().save_model(trainer, output_dir)
            return
        # It loads Lightning.
        from littrainer.strategies.deepspeed import start_for_evaluation

        start_for_evaluation(trainer)
        engine: Any = trainer.deepspeed
        if engine.zero_gather_16bit_weights_on_model_save():
            weights = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=_has_adapters(trainer))
            if weights is not None:
                trainer._save(output_dir, state_dict=weights)
            return
        logger.warning(
            "stage3_gather_16bit_weights_on_model_save is off, so the weights in %s are in the files of DeepSpeed's "
            "engine: run the zero_to_fp32.py beside them to get whole ones.",
            output_dir,
        )
        if trainer.args.should_save:
            trainer._save(output_dir, state_dict={})
            for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
                (Path(output_dir) / name).unlink(missing_ok=True)
        self._save_engine(trainer, Path(output_dir))

    def save_optimizer(self, trainer: Trainer, folder: Path, seal: Seal | None) -> None:
        """Let the engine write weights, optimizer and its own schedule."""
        self._save_engine(trainer, folder)

    def _save_engine(self, trainer: Trainer, folder: Path) -> None:
        trainer.deepspeed.save_checkpoint(str(folder), exclude_frozen_parameters=_has_adapters(trainer))

    def holds_weights(self, folder: Path) -> bool:
        """Whether the engine has written its folder."""
        return any(folder.glob(ENGINE_FOLDERS))

    def load_model(
        self, trainer: Trainer, model: nn.Module, folder: Path, to_resume: bool, tell: Callable[[Any], None]
    ) -> None:
        """Load the weights of the best model; those of a training that is resumed come with the optimizer's state."""
        _check(trainer, folder)
        if not to_resume:
            _load_engine(trainer, folder)

    def load_optimizer(self, trainer: Trainer, folder: Path) -> None:
        """Load weights, optimizer and the engine's own schedule."""
        _check(trainer, folder)
        _load_engine(trainer, folder)


def _load_engine(trainer: Trainer, folder: Path) -> None:
    path, _ = trainer.deepspeed.load_checkpoint(
        str(folder),
        load_module_strict=not _has_adapters(trainer),
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
    )
    if path is None:
        raise ValueError(f"DeepSpeed could not load {folder}. Its log says why; resume from another checkpoint.")


def _check(trainer: Trainer, folder: Path) -> None:
    if not any(folder.glob(ENGINE_FOLDERS)):
        raise ValueError(
            f"{folder} has no folder {ENGINE_FOLDERS} of DeepSpeed's engine, so DeepSpeed cannot go on from it. Resume "
            "it without `deepspeed`, or load its model with from_pretrained and start a new training."
        )
    latest = folder / LATEST_NAME
    if not latest.is_file() or not (folder / latest.read_text("utf-8").strip()).is_dir():
        there = ", ".join(sorted(path.name for path in folder.glob(ENGINE_FOLDERS)))
        raise ValueError(f"{latest} has to name the folder that DeepSpeed's engine reads; there is {there}.")
    parts = (PART_OF_PROCESS.fullmatch(path.name) for path in (folder / latest.read_text("utf-8").strip()).iterdir())
    wrote = len({part[1] for part in parts if part is not None})
    config: Any = trainer.args.hf_deepspeed_config
    size = data_parallel_size(trainer.args)
    if wrote not in (0, size) and not config.is_true("checkpoint.load_universal"):
        raise ValueError(
            f"{folder} was written by {wrote} processes, and there are {size}: DeepSpeed goes on with as many as "
            "before. Start so many, or convert it with DeepSpeed's ds_to_universal.py and set "
            '"checkpoint": {"load_universal": true} in its configuration.'
        )


def _has_adapters(trainer: Trainer) -> bool:
    return is_a(trainer.model, "peft model")


# Name -> whether a Trainer's model is held so, and how. The first that applies is taken.
STORAGES: dict[str, tuple[Callable[[Trainer], bool], WholeStorage]] = {
    "as DeepSpeed's engine writes it": (lambda trainer: trainer.is_deepspeed_enabled, EngineStorage()),
    "FSDP, each process its part": (saves_parts, PartsStorage()),
    "FSDP": (lambda trainer: trainer.is_fsdp_enabled, FsdpStorage()),
    "whole, put together from shards": (lambda trainer: is_sharded(trainer.model), WholeFromShards()),
    "whole": (lambda trainer: True, WholeStorage()),
}


def storage_of(trainer: Trainer) -> WholeStorage:
    """How checkpoints of a Trainer hold weights and the optimizer's state, as its strategy stands at this moment."""
    return next(storage for applies, storage in STORAGES.values() if applies(trainer))
