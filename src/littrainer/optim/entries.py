"""What the tables of optimizers are made of: where a class is, and how training arguments become its keywords."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from littrainer.optim.optimizer_arguments import Convert

if TYPE_CHECKING:
    from torch import nn

    from littrainer.arguments.training_arguments import TrainingArguments

Keywords = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What an entry makes its keywords from.

    Parameters:
        optim: the optimizer's name.
        args: the training arguments.
        settings: `optim_args`, converted.
        model: the model, where it is known.
    """

    optim: str
    args: TrainingArguments
    settings: dict[str, Any]
    model: nn.Module | None = None


class OptimizerNotInstalledError(ImportError, ValueError):
    """The library of an optimizer is missing; transformers raises one or the other of both, by optimizer."""


@dataclass(frozen=True)
class OptimizerEntry:
    """One row of the tables.

    Parameters:
        homes: where the class is, as "module:class"; the first that can be imported counts.
        keywords: makes the constructor's keywords.
        settings: keys that `optim_args` may have, with what converts their text.
        package: what to `pip install`; None for what comes with torch or with this package.
        projects: whether it projects the gradients of `optim_target_modules`.
        is_layerwise: whether each parameter has an optimizer of its own.
    """

    homes: tuple[str, ...]
    keywords: Callable[[Request], Keywords]
    settings: Mapping[str, Convert] = field(default_factory=dict)
    package: str | None = None
    projects: bool = False
    is_layerwise: bool = False

    def load_class(self, optim: str) -> Any:
        """The class.

        Raises:
            OptimizerNotInstalledError: its library is not installed, or has no such class.
        """
        reasons = []
        for home in self.homes:
            module, name = home.split(":")
            try:
                return getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                reasons.append(str(error))
        wanted = self.homes[0].replace(":", ".")
        raise OptimizerNotInstalledError(
            f"optim={optim!r} needs {wanted}, which cannot be imported ({'; '.join(reasons)}). "
            f"Run `pip install {self.package!r}`, or choose another optim."
        )


def learning_rate(request: Request) -> Keywords:
    """The learning rate only."""
    return {"lr": request.args.learning_rate}


def learning_rate_and_settings(request: Request) -> Keywords:
    """The learning rate, and what `optim_args` sets."""
    return {**learning_rate(request), **request.settings}


def adam_only(request: Request) -> Keywords:
    """What `adam_beta1`, `adam_beta2` and `adam_epsilon` say."""
    args = request.args
    return {"betas": (float(args.adam_beta1), float(args.adam_beta2)), "eps": args.adam_epsilon}


def adam(request: Request) -> Keywords:
    """The learning rate and the arguments about Adam."""
    return {**learning_rate(request), **adam_only(request)}


def adam_and_settings(defaults: Mapping[str, Any]) -> Callable[[Request], Keywords]:
    """As `adam`, and these settings, which `optim_args` changes."""
    return lambda request: {**adam(request), **defaults, **request.settings}
