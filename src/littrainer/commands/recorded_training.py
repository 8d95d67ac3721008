"""Runs a script up to the end of its first training, of which it takes a few steps, and leaves the run in a folder.

    python recorded_training.py SIDE STEPS FOLDER SCRIPT ARGS ...

`littrainer verify` starts this file for each Trainer. It imports nothing of littrainer, so that the process with
transformers' Trainer has nothing else; and it changes classes when the script imports them, not before.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import random
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

TRANSFORMERS, LITTRAINER = "transformers", "littrainer"
# Side -> the modules of its arguments, its Trainer and its callbacks.
MODULES = {
    TRANSFORMERS: ("transformers.training_args", "transformers.trainer", "transformers.trainer_callback"),
    LITTRAINER: ("littrainer.arguments.training_arguments", "littrainer.trainer", "littrainer.callbacks.base"),
}
# Of what a script draws before it seeds its generators, in both processes.
SEED = 0
TRACKERS = ("transformers.integrations.", "littrainer.tracking.")


def run_program(program: Sequence[str]) -> None:
    """Run a script, or `-m` and a module, with its arguments, as Python does."""
    is_module = program[0] == "-m"
    sys.argv = list(program[is_module:])
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(program[0]))
    if is_module:
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


def end_process(status: int) -> NoReturn:
    """End the process here, so that no `except` and no `finally` of the script goes on to write."""
    # They delete the script's temporary folders.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def patch_on_import(changes: dict[str, Callable[[Any], Any]]) -> None:
    """Let functions have modules, by their names, as soon as these have been loaded."""

    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        found = (one.find_spec(fullname, path, target) for one in sys.meta_path if one is not finder)
        spec: Any = next(filter(None, found), None) if fullname in changes else None
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), changes[fullname](module))
        return spec

    finder: Any = types.SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)


def redirect(kind: Any, name: str, folder: str) -> None:
    """Let a method first make the arguments which it has, or is, write into the folder and nowhere else."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def redirect_and_call(self: Any, *given: Any, **named: Any) -> Any:
        for args in (self, getattr(self, "args", None), *given, *named.values()):
            if hasattr(args, "report_to"):
                args.output_dir, args.push_to_hub, args.report_to = folder, False, []
        return method(self, *given, **named)

    setattr(kind, name, redirect_and_call)


def record(kind: Any, callbacks: str, steps: int) -> None:
    """Let `train()` take a few steps, log each, evaluate, save, and end the script."""
    train = kind.train

    @functools.wraps(train)
    def train_and_end(self: Any, *given: Any, **named: Any) -> None:
        args, listeners = self.args, self.callback_handler.callbacks
        args.logging_strategy, args.logging_steps = type(args.logging_strategy)("steps"), 1
        of_trackers = [one for one in listeners if any(c.__module__.startswith(TRACKERS) for c in type(one).__mro__)]
        listeners[:] = [one for one in listeners if one not in of_trackers]
        evaluates = self.eval_dataset is not None or args.eval_strategy != "no"
        self.add_callback(ending(importlib.import_module(callbacks).TrainerCallback, steps, evaluates))
        # True stands for the newest checkpoint in the user's folder, and there is none in this one.
        given = tuple(None if value is True else value for value in given)
        train(self, *given, **{name: None if value is True else value for name, value in named.items()})
        self.save_model()
        self.save_state()
        end_process(0)

    kind.train = train_and_end


def ending(base: Any, steps: int, evaluates: bool) -> Any:
    """Return a callback that ends a training after its steps; the schedule stays that of the whole training."""

    class Ending(base):
        left = steps

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.left -= 1
            if self.left <= 0 or state.global_step >= state.max_steps:
                self.left, control.should_training_stop = 0, True
                control.should_evaluate, control.should_save = evaluates, True

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Both were done at the last step.
            if self.left == 0:
                control.should_evaluate = control.should_save = False

    return Ending()


def main(side: str, steps: str, folder: str, *program: str) -> None:
    """Run the program, which is a script, or `-m` and a module, with its arguments."""
    arguments, trainer, callbacks = MODULES[side]
    refusal = "The script imports its Trainer from littrainer, so there is none of transformers to compare with."

    def change_trainer(module: Any) -> None:
        record(module.Trainer, callbacks, int(steps))
        redirect(module.Trainer, "train", folder)
        redirect(module.Trainer, "__init__", folder)

    # Many scripts make their model before they seed anything.
    random.seed(SEED)
    changes: dict[str, Callable[[Any], Any]] = {
        "torch": lambda torch: torch.manual_seed(SEED),
        "numpy.random": lambda numpy: numpy.seed(SEED),
        MODULES[LITTRAINER][1]: lambda _: sys.exit(refusal),
        arguments: lambda module: redirect(module.TrainingArguments, "__post_init__", folder),
        trainer: change_trainer,
    }
    patch_on_import(changes)
    if side == TRANSFORMERS:
        # `import littrainer.auto` would redirect the script.
        sys.modules["littrainer.auto"] = types.ModuleType("littrainer.auto")
    run_program(program)


if __name__ == "__main__":
    main(*sys.argv[1:])
