"""Members and signatures of the Trainer of transformers 4."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from littrainer.arguments.did_you_mean import suggest_name
from littrainer.checkpoint.retention import rotate_checkpoints
from littrainer.loop.overrides import SIGNATURES, accept_earlier_signature

if TYPE_CHECKING:
    from torch import nn

    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.evaluation.results import EvalLoopOutput

    Method = TypeVar("Method", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


def accept_earlier_keywords(**today: str) -> Callable[[Method], Method]:
    """Return a decorator that renames keywords (earlier name=new name) with a FutureWarning."""

    def decorate(method: Method) -> Method:
        parameters = [name for name in inspect.signature(method).parameters if name != "self"]
        valid = frozenset(parameters)

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for earlier in today.keys() & kwargs:
                name = today[earlier]
                if name in kwargs:
                    raise TypeError(f"{method.__name__}() got both {earlier} and {name}; give {name} alone.")
                _warn(f"{method.__qualname__}({earlier}=...)", f"{name}=...")
                kwargs[name] = kwargs.pop(earlier)
            if not valid.issuperset(kwargs):
                unknown = next(name for name in kwargs if name not in valid)
                raise TypeError(
                    f"{method.__qualname__}() got an unexpected keyword argument {unknown!r} "
                    f"({suggest_name(unknown, parameters)})"
                )
            return method(*args, **kwargs)

        return cast("Method", wrapper)

    return decorate


def _warn(earlier: str, today: str) -> None:
    warnings.warn(f"{earlier} is an earlier spelling: write {today}.", FutureWarning, stacklevel=3)


class EarlierTrainerMembers:
    """Members for scripts written for transformers 4."""

    # Set by the Trainer.
    processing_class: Any
    args: TrainingArguments
    model: Any
    accelerator: Any
    state: Any
    evaluation_loop: Any
    _require_optimizer: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in SIGNATURES:
            # Mixins may lack some methods.
            if hasattr(cls, name):
                accept_earlier_signature(cls, name)

    @property
    def tokenizer(self) -> Any:
        """Return `processing_class`, under its earlier name."""
        if "tokenizer" in vars(self):
            return vars(self)["tokenizer"]
        processing_class = self.processing_class
        _warn("trainer.tokenizer", "trainer.processing_class")
        return processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        # Before `super().__init__` a subclass sets its own attribute.
        if "processing_class" not in vars(self):
            vars(self)["tokenizer"] = value
            return
        _warn("trainer.tokenizer", "trainer.processing_class")
        self.processing_class = value

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run `evaluation_loop`, under its earlier name."""
        _warn("trainer.prediction_loop", "trainer.evaluation_loop")
        return self.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> int:
        """Count the input tokens in a loader's batches.

        Parameters:
            max_steps: multiply the tokens of the first batch by this number instead.
        """
        total = 0
        for batch in train_dl:
            if "input_ids" not in batch:
                logger.warning("num_tokens counts input_ids, and a batch has none.")
                break
            tokens = batch["input_ids"].numel()
            if max_steps is not None:
                return tokens * max_steps
            total += tokens
        return total

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group.

        Raises:
            ValueError: there is no optimizer yet.
        """
        return [group["lr"] for group in self._require_optimizer().param_groups]

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """Return the optimizer's parameter groups, or the group of a parameter.

        Raises:
            ValueError: there is no optimizer yet.
        """
        groups = self._require_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(member is param for member in group["params"])), None)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        return None if tensors is None else self.accelerator.gather(tensors)

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        folder = self.args.output_dir if output_dir is None else output_dir
        rotate_checkpoints(folder, self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime)
