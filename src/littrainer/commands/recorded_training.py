"""Program that runs a few steps of a script's first training, and saves the run in a folder.

python recorded_training.py SIDE STEPS FOLDER SCRIPT ARGS ...

`littrainer verify` runs this file, which must not import littrainer.
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
# Side -> modules of its arguments, Trainer and callbacks.
MODULES = {
    TRANSFORMERS: ("transformers.training_args", "transformers.trainer", "transformers.trainer_callback"),
    LITTRAINER: ("littrainer.arguments.training_arguments", "littrainer.trainer", "littrainer.callbacks.base"),
}
LIGHTNING_TRAINERS = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
# For scripts that draw numbers before they set a seed.
SEED = 0
# File in the folder of a run with the reason why the script cannot be verified.
REFUSAL_NAME = "refusal.txt"
TRACKERS = ("transformers.integrations.", "littrainer.tracking.")


def run_program(program: Sequence[str]) -> None:
    """Run a script (or `-m` and a module) as Python does."""
    is_module = program[0] == "-m"
    sys.argv = list(program[is_module:])
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(program[0]))
    if is_module:
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


def end_process(status: int) -> NoReturn:
    """End the process without the script's `except` and `finally` blocks, which might write."""
    # Exit functions delete the script's temporary folders.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def patch_on_import(changes: dict[str, Callable[[Any], Any]]) -> Callable[[], None]:
    """Call functions with modules as soon as these are loaded; return a function that ends this."""
    for name in changes.keys() & sys.modules.keys():
        changes[name](sys.modules[name])

    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        finders = (other for other in sys.meta_path if other is not finder)
        specs = (other.find_spec(fullname, path, target) for other in finders)
        spec: Any = next(filter(None, specs), None) if fullname in changes else None
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), changes[fullname](module))
        return spec

    finder: Any = types.SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder)


def call_before_lightning_fit(action: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Call a function with a `lightning.Trainer` and its module before each `fit`; return a function that ends this."""
    original: list[tuple[Any, Any]] = []

    def change_fit(module: Any) -> None:
        fit = module.Trainer.fit
        original.append((module.Trainer, fit))

        # LightningCLI reads the signature.
        @functools.wraps(fit)
        def act_and_fit(lightning_trainer: Any, model: Any, *positional: Any, **keywords: Any) -> Any:
            action(lightning_trainer, model)
            return fit(lightning_trainer, model, *positional, **keywords)

        module.Trainer.fit = act_and_fit

    end_imports = patch_on_import(dict.fromkeys(LIGHTNING_TRAINERS, change_fit))

    def restore() -> None:
        end_imports()
        for kind, fit in reversed(original):
            kind.fit = fit

    return restore


def redirect(kind: Any, name: str, folder: str) -> None:
    """Patch a method to first redirect the output of training arguments to a folder."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def redirect_and_call(instance: Any, *positional: Any, **keywords: Any) -> Any:
        for args in (instance, getattr(instance, "args", None), *positional, *keywords.values()):
            if hasattr(args, "report_to"):
                args.output_dir, args.push_to_hub, args.report_to = folder, False, []
        return method(instance, *positional, **keywords)

    setattr(kind, name, redirect_and_call)


def record(kind: Any, callbacks: str, steps: int) -> None:
    """Patch `train()` to take a few steps, log each, evaluate, save, and end the script."""
    train = kind.train

    @functools.wraps(train)
    def train_and_end(trained: Any, *positional: Any, **keywords: Any) -> None:
        args, handler = trained.args, trained.callback_handler
        args.logging_strategy, args.logging_steps = type(args.logging_strategy)("steps"), 1
        handler.callbacks[:] = [
            callback
            for callback in handler.callbacks
            if not any(base.__module__.startswith(TRACKERS) for base in type(callback).__mro__)
        ]
        has_evaluation = trained.eval_dataset is not None or args.eval_strategy != "no"
        base = importlib.import_module(callbacks).TrainerCallback
        trained.add_callback(create_stopping_callback(base, steps, has_evaluation))
        # resume_from_checkpoint=True means the newest checkpoint in output_dir; the redirected folder has none.
        positional = tuple(None if value is True else value for value in positional)
        train(trained, *positional, **{name: None if value is True else value for name, value in keywords.items()})
        trained.save_model()
        trained.save_state()
        end_process(0)

    kind.train = train_and_end


def create_stopping_callback(base: Any, steps: int, has_evaluation: bool) -> Any:
    """Return a callback that stops training without a change of the schedule."""

    class StoppingCallback(base):
        remaining = steps

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.remaining -= 1
            if self.remaining <= 0 or state.global_step >= state.max_steps:
                self.remaining, control.should_training_stop = 0, True
                control.should_evaluate, control.should_save = has_evaluation, True

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # The last step has evaluated and saved.
            if self.remaining == 0:
                control.should_evaluate = control.should_save = False

    return StoppingCallback()


def main(side: str, steps: str, folder: str, *program: str) -> None:
    arguments, trainer, callbacks = MODULES[side]

    def refuse(reason: str) -> NoReturn:
        with open(os.path.join(folder, REFUSAL_NAME), "w", encoding="utf-8") as file:
            file.write(reason)
        end_process(1)

    def change_trainer(module: Any) -> None:
        record(module.Trainer, callbacks, int(steps))
        redirect(module.Trainer, "train", folder)
        redirect(module.Trainer, "__init__", folder)

    random.seed(SEED)
    changes: dict[str, Callable[[Any], Any]] = {
        "torch": lambda torch: torch.manual_seed(SEED),
        "numpy.random": lambda numpy: numpy.seed(SEED),
        MODULES[LITTRAINER][1]: lambda _: refuse("imports its Trainer from littrainer"),
        arguments: lambda module: redirect(module.TrainingArguments, "__post_init__", folder),
        trainer: change_trainer,
    }
    patch_on_import(changes)
    if side == TRANSFORMERS:
        # `import littrainer.auto` would redirect the script.
        sys.modules["littrainer.auto"] = types.ModuleType("littrainer.auto")
        # littrainer's Trainer calls it too.
        call_before_lightning_fit(lambda *_: refuse("trains with lightning.Trainer"))
    run_program(program)


if __name__ == "__main__":
    main(*sys.argv[1:])
