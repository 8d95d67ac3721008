"""What `trainer.accelerator` is: the names that Trainer subclasses call, without accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from littrainer.compat.accelerator.layouts import SplitModelsOfAccelerator
from littrainer.compat.accelerator.members import REFUSED
from littrainer.compat.accelerator.preparing import Preparing
from littrainer.compat.accelerator.processes import Collectives, ProcessMembers
from littrainer.compat.accelerator.saving import Saving
from littrainer.compat.accelerator.settings import Settings
from littrainer.compat.accelerator.states import AcceleratorStateView, shared_accelerator_state
from littrainer.compat.accelerator.stepping import Stepping
from littrainer.distributed import collectives
from littrainer.distributed.layout import tensor_parallel_size
from littrainer.errors.nested_values import truncated

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class AcceleratorFacade(ProcessMembers, Collectives, Stepping, Preparing, Saving, SplitModelsOfAccelerator, Settings):
    """Stands where subclasses of a Trainer expect an accelerator; `members` lists what it answers.

    Parameters:
        args: the training arguments, which know device and ranks.
    """

    def __init__(self, args: TrainingArguments):
        ProcessMembers.__init__(self, args)
        Settings.__init__(self, args)
        Preparing.__init__(self)
        Saving.__init__(self)
        Stepping.__init__(self)
        # Samples in the batch at hand where it is an evaluation's last and not a full one; set by the evaluation.
        self.samples_in_last_batch: int | None = None
        self.evaluated_loader: Any = None
        # Libraries make accelerate's own state anew, in callbacks for instance, and expect it to be set up.
        shared_accelerator_state(args)

    def take_over_from(self, other: AcceleratorFacade) -> None:
        """Stand in another one's place, in the midst of a training too."""
        self.module, self._scaler = other.module, other._scaler
        self.samples_in_last_batch = other.samples_in_last_batch

    @property
    def state(self) -> Any:
        """What the run's set-up is: accelerate's AcceleratorState where accelerate is loaded, else one like it."""
        return shared_accelerator_state(self._args) or AcceleratorStateView(self._args)

    @contextmanager
    def evaluating(self, loader: Any) -> Iterator[None]:
        """While the block runs, the loader of an evaluation is the one that is being read."""
        outer, self.evaluated_loader = self.evaluated_loader, loader
        try:
            yield
        finally:
            self.evaluated_loader = outer

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without samples that were only there to fill the last batch.

        Parameters:
            use_gather_object: gather Python objects, as is done for anything that holds more than tensors.
        """
        rows = self._rows_that_count()
        if rows is None and collectives.process_count() == 1:
            return input_data
        copies = self._processes_with_the_same_samples
        if not use_gather_object and collectives.holds_only_tensors(input_data):
            data = collectives.gathered(input_data, copies)
        else:
            data = collectives.gathered_objects(input_data, copies)
            if rows is not None and isinstance(data, list):
                return data[:rows]
        return data if rows is None else truncated(data, rows)

    def gather_each_sample(self, tensor: Any) -> Any:
        """As `gather`, but a sample that several processes have predicted together stands in it once."""
        return collectives.gathered(tensor, self._processes_with_the_same_samples)

    @property
    def _processes_with_the_same_samples(self) -> int:
        return tensor_parallel_size(self._args)

    def _rows_that_count(self) -> int | None:
        if self.evaluated_loader is not None or self.samples_in_last_batch is not None:
            return self.samples_in_last_batch
        # In training all micro-batches of the last window count as many rows as its last one has, as in transformers.
        state = self.gradient_state
        return state.remainder if state.end_of_dataloader and state.remainder > 0 else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reason = REFUSED.get(name)
        if reason is not None:
            raise AttributeError(f"trainer.accelerator does not offer {name}: {reason}.")
        raise AttributeError(
            f"trainer.accelerator has no {name!r}: littrainer trains on Lightning, and answers what accelerate's "
            "Accelerator has. Ask trainer.lightning_trainer (its strategy), or torch, instead."
        )
