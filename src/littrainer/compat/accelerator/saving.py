"""The members of an accelerator that write files, and those about trackers, of which a Trainer's has none."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from littrainer.strategies.shards import is_sharded, whole_state_dict

logger = logging.getLogger(__name__)


class Saving:
    """What a subclass calls to save objects of its own; checkpoints are the Trainer's."""

    def __init__(self: Any) -> None:
        self._custom_objects: list[Any] = []
        self._told: set[str] = set()

    def get_state_dict(self: Any, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state dict, under the names of the user's model.

        Parameters:
            unwrap: take wrappers off before.

        Returns:
            whole tensors; where the model is sharded, in the first process, and an empty dict in the others. All
            processes have to call it then.
        """
        consolidated = getattr(model, "_zero3_consolidated_16bit_state_dict", None)
        plugin = self._args.deepspeed_plugin
        if consolidated is not None and plugin is not None and plugin.zero_stage == 3:
            return consolidated()
        if unwrap:
            model = self.unwrap_model(model, keep_torch_compile=False)
        return whole_state_dict(model) if is_sharded(model) else model.state_dict()

    def save(self: Any, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file, in the first process (of each node where `save_on_each_node` is set).

        Parameters:
            safe_serialization: it is a dict of tensors, and becomes a safetensors file.
        """
        if not (self.is_local_main_process if self._args.save_on_each_node else self.is_main_process):
            return
        if not safe_serialization:
            torch.save(obj, f)
            return
        from safetensors.torch import save_file

        # Tensors that share memory are refused by the format, and views have more of it than they show.
        save_file({name: value.clone().contiguous() for name, value in obj.items()}, f, metadata={"format": "pt"})

    def save_model(
        self: Any,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights into a folder: `model.safetensors`, or shards of it with an index.

        Parameters:
            max_shard_size: a number of bytes, or such as `5GB`.
            safe_serialization: false writes `pytorch_model.bin`.

        Raises:
            NotADirectoryError: the folder is a file.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise NotADirectoryError(f"accelerator.save_model: {folder} is a file; give a folder.")
        state_dict = self.get_state_dict(model)
        if not self.is_main_process:
            return
        from huggingface_hub import save_torch_state_dict

        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(state_dict, folder, max_shard_size=max_shard_size, safe_serialization=safe_serialization)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Take objects with states of their own; no Trainer's checkpoint holds them, which a warning says.

        Raises:
            ValueError: one has no `state_dict` or `load_state_dict`.
        """
        unfit = [
            type(one).__name__
            for one in objects
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))
        ]
        if unfit:
            raise ValueError(
                f"register_for_checkpointing takes objects with state_dict and load_state_dict; {', '.join(unfit)} "
                "lack them."
            )
        self._custom_objects.extend(objects)
        self._tell(
            "register_for_checkpointing",
            "A Trainer's checkpoints do not hold objects registered with the accelerator, here or in transformers: "
            "save them in an on_save callback, or in a callback with a state() (ExportableState).",
        )

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Do nothing but say so: a Trainer's accelerator has no trackers."""
        self._tell(
            "init_trackers", "The accelerator of a Trainer has no trackers to set up; choose them with report_to=[...]."
        )

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Do nothing but say so: a Trainer's accelerator has no trackers."""
        self._tell("log", "accelerator.log() reaches no tracker of a Trainer; call trainer.log() instead.")

    def end_training(self) -> None:
        """Leave the process group, where there is one."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _tell(self, name: str, message: str) -> None:
        if name not in self._told:
            self._told.add(name)
            logger.warning(message)
