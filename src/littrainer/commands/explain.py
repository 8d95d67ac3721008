"""The command `littrainer explain`: describes training arguments on Lightning, in words or as a program."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NoReturn

from littrainer.arguments.destinations import DERIVED_KEYWORDS, READERS
from littrainer.arguments.did_you_mean import unrecognized
from littrainer.commands.command_line import (
    BAD_INPUT,
    BadInput,
    CommandParser,
    check_script,
    list_option_names,
    reject,
)
from littrainer.commands.output_dirs import remove_output_dirs
from littrainer.commands.recorded_training import call_before_lightning_fit, run_program

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.trainer import Trainer

DESCRIPTION = """\
Show what training arguments turn into on Lightning: where each of your arguments goes, the keywords of
lightning.Trainer, and the parts of the training. A script is run up to its first Trainer, or to the fit of its
lightning.Trainer, and stopped there: it loads its data and its model, and trains nothing. What it prints goes to
standard error.
"""
USAGE = """\
littrainer explain [OPTIONS] --ARGUMENT VALUE ...
       littrainer explain [OPTIONS] SCRIPT [ARGS ...]"""
# Further arguments that become keywords in a program.
IN_KEYWORDS = frozenset(
    (
        *("output_dir", "num_train_epochs", "max_steps", "full_determinism", "lightning"),
        *("logging_strategy", "logging_steps", "eval_strategy", "eval_steps", "eval_on_start", "disable_tqdm"),
        *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "greater_is_better"),
        *("do_train", "do_eval", "do_predict", "gradient_accumulation_steps", "bf16", "fp16", "use_cpu"),
    )
)
# Arguments without effect on the program's placeholder model.
ABOUT_MODELS = frozenset(
    (
        *("activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing", "label_names"),
        *("gradient_checkpointing_kwargs", "use_liger_kernel", "liger_kernel_config", "neftune_noise_alpha"),
        *("optim_target_modules", "predict_with_generate", "generation_max_length", "generation_num_beams"),
    )
)
SCRIPT_OBJECTS_HINT = (
    "Add the objects of the script's Trainer: return the model in make_model and the training data in make_rows; give",
    "metrics, loss function and optimizers to TransformersModule, other data and the collator to TrainerDataModule,",
    "callbacks to pl.Trainer; and write overridden methods in a subclass of TransformersModule.",
)


class TrainerReached(BaseException):
    """Signal that passes the script's `except Exception`; its argument is the text to print."""


def main(words: Sequence[str]) -> int:
    parser = CommandParser("explain", DESCRIPTION, usage=USAGE)
    parser.add_argument("--as-code", action="store_true", help="print an equivalent Lightning program")
    parser.epilog = "Write the option before the script, or among the training arguments."
    script_index = 1 if words[:1] == ["--as-code"] else 0
    if len(words) == script_index or words[script_index].startswith("-"):
        options, rest = parser.parse_known_args(words)
        return _explain_arguments(parser, rest, options.as_code)
    return _explain_script(words[script_index], list(words[script_index + 1 :]), script_index == 1)


def _explain_arguments(command: CommandParser, words: list[str], as_code: bool) -> int:
    from littrainer.arguments.parser import HfArgumentParser
    from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments

    class ArgumentParser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:  # type: ignore[misc]
            self.exit(BAD_INPUT, f"{self.prog}: {' '.join(message.split())}\n")

    try:
        parser: Any = ArgumentParser(Seq2SeqTrainingArguments, prog=command.prog, add_help=False)
        with warnings.catch_warnings(record=True) as caught, remove_output_dirs(should_create=False):
            args, unknown = parser.parse_args_into_dataclasses(
                words, look_for_args_file=False, return_remaining_strings=True
            )
            for warning in caught:
                print(f"littrainer explain: {warning.message}", file=sys.stderr)
            if unknown:
                raise BadInput(unrecognized(unknown, [*list_option_names(command), *list_option_names(parser)]))
            print(render_program(args) if as_code else explain_trainer(_create_tiny_trainer(args), args, words), end="")
    except (TypeError, ValueError, NotImplementedError, ImportError) as error:
        raise BadInput(str(error)) from error
    return 0


def _create_tiny_trainer(args: TrainingArguments) -> Trainer:
    from torch import nn

    from littrainer.trainer import Trainer

    # The tiny model cannot generate.
    args = copy.copy(args)
    vars(args).update(predict_with_generate=False, generation_config=None)
    rows = [{"input": 0.0}]
    return Trainer(model=nn.Linear(1, 1), args=args, train_dataset=rows, eval_dataset=rows)


def _explain_script(script: str, words: list[str], as_code: bool) -> int:
    check_script(script)
    from littrainer.redirection.redirect import install
    from littrainer.trainer import Trainer

    trainer_class: Any = Trainer
    make_trainer = trainer_class.__init__

    def make_and_stop(self: Trainer, *args: Any, **kwargs: Any) -> NoReturn:
        make_trainer(self, *args, **kwargs)
        page = render_program(self.args, script) if as_code else explain_trainer(self, self.args, words, has_data=True)
        raise TrainerReached(page)

    def explain_and_stop(lightning_trainer: Any, module: Any) -> NoReturn:
        if as_code:
            raise SystemExit(reject("explain", f"{script} trains with lightning.Trainer: it is a Lightning program"))
        raise TrainerReached(explain_lightning_trainer(lightning_trainer, module))

    install()
    restore_fit = call_before_lightning_fit(explain_and_stop)
    trainer_class.__init__ = make_and_stop
    try:
        with remove_output_dirs(should_create=False), contextlib.redirect_stdout(sys.stderr):
            run_program([script, *words])
    except TrainerReached as reached:
        print(reached, end="")
        return 0
    finally:
        trainer_class.__init__ = make_trainer
        restore_fit()
    raise BadInput(f"{script} ended without making a Trainer, so there is nothing to explain")


# ---- In words --------------------------------------------------------------------------------------------------------


def explain_trainer(
    trainer: Trainer, args: TrainingArguments, words: Sequence[str] = (), has_data: bool = False
) -> str:
    """Describe the destinations of a Trainer's arguments, and the resulting Lightning keywords and parts.

    Parameters:
        trainer: a Trainer that has not trained; its `lightning.Trainer` is built.
        words: the command line; its arguments are shown first.
        has_data: whether the Trainer has the data of a training, whose length is shown then.
    """
    from littrainer.arguments.normalization import list_trackers
    from littrainer.arguments.report_to import format_tracker
    from littrainer.lightning_adapter import lightning_trainer
    from littrainer.tracking.shared_logger import SharedLogger

    def reason(name: str) -> str:
        if name in (trainer.lightning_keywords or {}) or name in (trainer.args.lightning or {}):
            return "given as `lightning`"
        tables = (lightning_trainer.FIXED_KEYWORDS, lightning_trainer.LAUNCHER_KEYWORDS, DERIVED_KEYWORDS)
        return next(str(table[name][1]) for table in tables if name in table)

    lightning: Any = lightning_trainer.build_lightning_trainer(trainer, run=None)
    keywords = lightning_trainer.lightning_keywords(trainer.args, trainer.lightning_keywords)
    rows = [(f"{name}={value!r}", reason(name)) for name, value in keywords.items()]
    epochs, length = _describe_length(trainer) if has_data else ("...", "")
    rows.append((f"max_epochs={epochs}", "num_train_epochs or max_steps, and the length of the data"))
    mode = "manual" if trainer.overrides_training_step() else "automatic"
    trackers = ", ".join(map(format_tracker, list_trackers(trainer.args.report_to))) or "none"
    values = trainer.args.to_dict()
    optimizer = f"{values['optim']}, learning_rate={values['learning_rate']!r}"
    parts = [
        *([("length", length)] if has_data else []),
        *_list_lightning_parts(lightning),
        ("optimization", f"{mode}; {_describe_window(trainer.args.gradient_accumulation_steps)}"),
        ("optimizer", optimizer if trainer.optimizer is None else _name([trainer.optimizer])),
        ("schedule", values["lr_scheduler_type"] if trainer.lr_scheduler is None else _name([trainer.lr_scheduler])),
        ("Trainer callbacks", _name(trainer.callback_handler.callbacks)),
        ("Lightning callbacks", _name(trainer.lightning_callbacks)),
        ("Lightning loggers", _name(logger for logger in lightning.loggers if not isinstance(logger, SharedLogger))),
        ("trackers", f"{trackers} (report_to)"),
    ]
    options = {word.partition("=")[0].replace("-", "_") for word in words}
    named = {name: value for name, value in args.to_dict().items() if {f"__{name}", f"__no_{name}"} & options}
    changed = [
        (f"{name}={value!r}", f"{READERS[name]}: {_get_purpose(name)}")
        for name, value in (named | get_changed_arguments(args)).items()
    ]
    return _format_sections(
        {
            "your arguments, and those that differ from their defaults": changed,
            "keywords of lightning.Trainer": rows,
            "parts of the training": parts,
        }
    )


def _describe_length(trainer: Trainer) -> tuple[str, str]:
    """Return the number of epochs that lightning.Trainer gets, and the length of the training in words."""
    from littrainer.loop.plan import TrainingPlan

    try:
        plan = TrainingPlan(*trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader()))
    except Exception as error:
        # Such as a script without training data; the rest is explained.
        return "...", f"unknown: {error}"
    steps = f"{plan.max_steps:,} optimizer steps of {plan.total_train_batch_size} samples"
    if plan.is_endless:
        return "-1", steps
    return str(plan.num_train_epochs), f"{steps}, {plan.num_train_epochs} epochs of {plan.num_examples:,} samples"


def explain_lightning_trainer(lightning_trainer: Any, module: Any) -> str:
    """Describe a `lightning.Trainer` before its `fit`, and the arguments of a TransformersModule."""
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.lightning import arguments
    from littrainer.lightning.ignored_arguments import LIGHTNING_EQUIVALENTS

    clipping = lightning_trainer.gradient_clip_val
    names = ("max_epochs", "max_steps", "max_time", "check_val_every_n_epoch", "val_check_interval")
    settings = {name: getattr(lightning_trainer, name, None) for name in names}
    length = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not None)
    sections = {
        "this script trains with lightning.Trainer, whose fit was not run": [
            ("module", type(module).__name__),
            ("length", length),
            ("devices", f"{lightning_trainer.num_devices} on each of {lightning_trainer.num_nodes} nodes"),
            *_list_lightning_parts(lightning_trainer),
            ("optimization", _describe_window(lightning_trainer.accumulate_grad_batches)),
            ("gradient clipping", "none" if clipping is None else f"gradient_clip_val={clipping!r}"),
            ("Lightning callbacks", _name(lightning_trainer.callbacks)),
            ("Lightning loggers", _name(lightning_trainer.loggers)),
        ]
    }
    args = getattr(module, "args", None)
    if isinstance(args, TrainingArguments):
        ignored = {name: f"lightning.Trainer decides: {code}" for name, code in LIGHTNING_EQUIVALENTS.items()}
        sections["arguments of the module that differ from their defaults"] = [
            (f"{name}={value!r}", ignored.get(name) or _get_purpose(name))
            for name, value in arguments.get_changed_arguments(args).items()
        ]
    return _format_sections(sections)


def _list_lightning_parts(lightning_trainer: Any) -> list[tuple[str, str]]:
    precision = lightning_trainer.precision_plugin
    return [
        (
            "strategy",
            f"{_name_lightning_class(lightning_trainer.strategy)} on {lightning_trainer.strategy.root_device}",
        ),
        ("precision plugin", f"{_name_lightning_class(precision)} ({precision.precision})"),
    ]


def _name_lightning_class(part: Any) -> str:
    """Return the class of Lightning, which its documentation describes, of an object of a subclass."""
    packages = ("lightning", "pytorch_lightning")
    kinds = (kind for kind in type(part).__mro__ if kind.__module__.partition(".")[0] in packages)
    return next(kinds, type(part)).__name__


def _describe_window(micro_batches: int) -> str:
    return f"the optimizer steps after {'each micro-batch' if micro_batches == 1 else f'{micro_batches} micro-batches'}"


def _name(objects: Iterable[Any]) -> str:
    return ", ".join(type(instance).__name__ for instance in objects) or "none"


def _format_sections(sections: dict[str, list[tuple[str, str]]]) -> str:
    blocks = ("\n".join([title, *_format_rows(rows or [("none", "")])]) for title, rows in sections.items())
    return "\n\n".join(blocks) + "\n"


def _get_purpose(name: str) -> str:
    from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments

    text: str = Seq2SeqTrainingArguments.__dataclass_fields__[name].metadata["help"]
    return text.partition(";")[0].partition(": ")[0].rstrip(".") + "."


def get_changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments with other values than the defaults, with masked tokens."""
    from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments

    values, defaults = args.to_dict(), {**Seq2SeqTrainingArguments().to_dict(), "output_dir": None}
    return {name: values[name] for name, default in defaults.items() if name in values and values[name] != default}


def _format_rows(rows: list[tuple[str, str]], widest: int = 44) -> list[str]:
    width = min(max(len(left) for left, _ in rows), widest)
    return [f"  {left:<{width}}  {right}".rstrip() for left, right in rows]


# ---- As a program ----------------------------------------------------------------------------------------------------


def render_program(args: TrainingArguments, script: str | None = None) -> str:
    """Return a Lightning program with the same training."""
    from littrainer.lightning.arguments import is_plain
    from littrainer.lightning.ignored_arguments import DATA_MODULE_ARGUMENTS, LIGHTNING_EQUIVALENTS, MODULE_ARGUMENTS

    in_arguments, left_out = [], []
    for name, value in get_changed_arguments(args).items():
        sentence = _get_purpose(name)
        if name in ABOUT_MODELS:
            left_out.append(f"- {name}: {sentence} It needs your model; add it to ARGUMENTS then.")
        elif not is_plain(value):
            left_out.append(f"- {name}: {sentence} It holds objects, which cannot be printed; add them.")
        elif name == "metric_for_best_model" and value not in ("loss", "eval_loss"):
            left_out.append(f"- {name}: {sentence} Give TransformersModule the compute_metrics that returns it.")
        elif name in DATA_MODULE_ARGUMENTS or name in MODULE_ARGUMENTS or name == "max_grad_norm":
            in_arguments.append(f'    "{name}": {value!r},  # {READERS[name]}: {sentence}\n')
        elif name not in IN_KEYWORDS:
            instead = f" Instead: {LIGHTNING_EQUIVALENTS[name]}." if name in LIGHTNING_EQUIVALENTS else ""
            left_out.append(f"- {name}: {sentence}{instead}")
    origin = "these arguments" if script is None else f"the arguments of {os.path.basename(script)}"
    heading = [f"The training that {origin} describe, as a plain Lightning program."]
    if left_out:
        heading += ["", "Not in this program:", *left_out]
    if script is not None:
        heading += ["", *SCRIPT_OBJECTS_HINT]
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    template = files("littrainer.commands").joinpath("lightning_program.txt").read_text("utf-8")
    return template % {
        "heading": "\n".join(heading).replace("\\", "/").replace('"""', "'''"),
        "arguments": "".join(in_arguments),
        "seed": args.seed,
        "total_steps": _format_total_steps(args),
        "evaluation_rows": "make_rows()" if evaluates else "None",
        "keywords": "".join(f"        {name}={value},\n" for name, value in _build_keywords(args).items()),
        "validate": "    trainer.validate(module, data, verbose=False)\n" if args.eval_on_start else "",
    }


def _format_total_steps(args: TrainingArguments) -> str:
    if args.max_steps > 0:
        return str(args.max_steps)
    batches = f"len(rows) {'// ' if args.dataloader_drop_last else '/ '}{args.per_device_train_batch_size}"
    return f"math.ceil({args.num_train_epochs!r} * math.ceil({batches} / {args.gradient_accumulation_steps}))"


def _format_steps(interval: float | None) -> str:
    """Return an interval as code; below 1, as a fraction of all steps."""
    return f"math.ceil(total_steps * {interval!r})" if interval and interval < 1 else str(int(interval or 1))


def _build_keywords(args: TrainingArguments) -> dict[str, str]:
    from littrainer.lightning.arguments import is_plain

    keywords = {name: repr(find(args)) for name, (find, _) in DERIVED_KEYWORDS.items()}
    keywords |= {"devices": "1", "max_steps": "total_steps", "max_epochs": "-1", "num_sanity_val_steps": "0"}
    keywords |= {"enable_model_summary": "False", "enable_progress_bar": repr(not args.disable_tqdm)}
    keywords["logger"] = "False" if args.logging_strategy == "no" else f"pl.loggers.CSVLogger({args.output_dir!r})"
    if args.logging_strategy == "steps":
        keywords["log_every_n_steps"] = _format_steps(args.logging_steps)
    if args.eval_strategy == "steps":
        keywords["val_check_interval"] = f"{args.gradient_accumulation_steps} * {_format_steps(args.eval_steps)}"
        keywords["check_val_every_n_epoch"] = "None"
    elif args.eval_strategy == "no":
        keywords["limit_val_batches"] = "1.0" if args.eval_on_start else "0"
    if args.full_determinism:
        keywords["deterministic"] = "True"
    if args.save_strategy == "no":
        keywords["enable_checkpointing"] = "False"
    else:
        limit = args.save_total_limit or 0
        top_k = limit if limit > 0 else -1
        settings = f"{args.output_dir!r}, save_top_k={top_k}, save_weights_only={args.save_only_model}"
        if args.load_best_model_at_end or args.save_strategy == "best":
            settings += ', monitor="val_loss"'
        elif top_k > 0:
            settings += ', monitor="step", mode="max"'
        if args.save_strategy == "steps":
            settings += f", every_n_train_steps={_format_steps(args.save_steps)}"
        keywords["callbacks"] = f"[pl.callbacks.ModelCheckpoint({settings})]"
    further: Any = args.lightning or {}
    return keywords | {name: repr(value) for name, value in further.items() if is_plain(further)}
