"""The command `littrainer explain`: what training arguments turn into, in words and as a Lightning program.

Both read the table of destinations. The program leaves what arguments mean to `TransformersModule`, `TrainerDataModule`
and `lightning.Trainer`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from littrainer.arguments.destinations import DESTINATIONS, derived_keywords
from littrainer.arguments.did_you_mean import unrecognized
from littrainer.arguments.parser import HfArgumentParser
from littrainer.commands.command_line import BAD_INPUT, CommandParser, complain, option_names

DESCRIPTION = """\
Show what training arguments turn into on Lightning: where each of your arguments goes, the keywords of
lightning.Trainer, and the parts of the training. A script is run up to its first Trainer and stopped there: it loads
its data and its model, and trains nothing. What it prints goes to standard error.
"""
USAGE = """\
littrainer explain [OPTIONS] --ARGUMENT VALUE ...
       littrainer explain [OPTIONS] SCRIPT [ARGS ...]"""
# Arguments that become keywords in a printed program, in addition to those with keywords in the table of destinations.
IN_KEYWORDS = frozenset(
    (
        *("output_dir", "num_train_epochs", "max_steps", "full_determinism", "lightning"),
        *("logging_strategy", "logging_steps", "eval_strategy", "eval_steps", "eval_on_start", "disable_tqdm"),
        *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "greater_is_better"),
        *("do_train", "do_eval", "do_predict"),
    )
)
# Arguments that have no effect on the model that stands in for yours.
ABOUT_MODELS = frozenset(
    (
        *("activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing", "label_names"),
        *("gradient_checkpointing_kwargs", "use_liger_kernel", "liger_kernel_config", "neftune_noise_alpha"),
        *("optim_target_modules", "predict_with_generate", "generation_max_length", "generation_num_beams"),
    )
)
# What the program of a script cannot hold.
OBJECTS_OF_A_SCRIPT = (
    "Add the objects of the script's Trainer: return the model in make_model and the training data in make_rows; give",
    "metrics, loss function and optimizers to TransformersModule, other data and the collator to TrainerDataModule,",
    "callbacks to pl.Trainer; and write overridden methods in a subclass of TransformersModule.",
)
PROGRAM = '''\
"""%(heading)s
"""

import math
from typing import Any

import lightning.pytorch as pl
import torch

from littrainer import TrainerDataModule, TransformersModule

# What the model, its optimizer, its loss and its data are trained with.
ARGUMENTS: dict[str, Any] = {
%(arguments)s}


class StandIn(torch.nn.Module):
    # Instead of your model: return yours in make_model.
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.norm(torch.relu(self.inner(x))))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return StandIn()


def make_rows() -> Any:
    # Random rows instead of your data: return yours.
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": int(row[:3].argmax())} for row in rows]


def main() -> pl.Trainer:
    model, rows = make_model(), make_rows()
    total_steps = %(total_steps)s
    pl.seed_everything(%(seed)s, workers=True)  # As a Trainer does, which is made when there is a model.
    module, data = TransformersModule(model, ARGUMENTS), TrainerDataModule(rows, %(evaluation_rows)s)
    trainer = pl.Trainer(
%(keywords)s    )
%(validate)s    trainer.fit(module, data)
    loss = float(trainer.callback_metrics["train_loss"])
    print(f"{trainer.global_step} optimizer steps, last loss {loss:.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
'''


# ---- The command line ------------------------------------------------------------------------------------------------


class _ArgumentParser(HfArgumentParser):
    """The parser of the training arguments, whose complaints look like those of all commands."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {' '.join(message.split())}\n")


def build_parser() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser("littrainer explain", description=DESCRIPTION, usage=USAGE)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--as-code", "--as_code", action="store_true", help="print a Lightning program that trains the same"
    )
    parser.epilog = "Write the option before the script, or among the training arguments."
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer explain`; returns the exit status."""
    before = 1 if words[:1] in (["--as-code"], ["--as_code"]) else 0
    if len(words) == before or words[before].startswith("-"):
        options, rest = build_parser().parse_known_args(words)
        return _explain_arguments(rest, options.as_code)
    script, *own = words[before:]
    if "--as-code" in own:
        return complain("explain", f"--as-code after {script!r} is passed to the script; write it before the script")
    return _explain_script(script, own, before == 1)


def _explain_arguments(words: list[str], as_code: bool) -> int:
    from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments

    parser = _ArgumentParser(Seq2SeqTrainingArguments, prog="littrainer explain", add_help=False)
    try:
        with warnings.catch_warnings(record=True) as caught:
            args, left = parser.parse_args_into_dataclasses(
                words, look_for_args_file=False, return_remaining_strings=True
            )
        for warning in caught:
            print(f"littrainer explain: {warning.message}", file=sys.stderr)
        if any(map(os.path.isfile, left)):
            return complain("explain", "write the script before its arguments: littrainer explain SCRIPT ARGS ...")
        if left:
            known = [*option_names(build_parser()), *option_names(parser)]
            return complain("explain", unrecognized(left, known))
        print(program(args) if as_code else explanation(_stand_in_trainer(args), args, words), end="")
    except (TypeError, ValueError, NotImplementedError, ImportError) as error:
        return complain("explain", str(error))
    return 0


def _stand_in_trainer(args: Any) -> Any:
    """Return a Trainer with these arguments, a model of one weight and one sample."""
    from torch import nn

    from littrainer.trainer import Trainer

    with _without_a_trace(args) as copied:
        # A model of one weight generates nothing.
        copied.predict_with_generate, copied.generation_config = False, None
        rows = [{"input": 0.0}]
        return Trainer(model=nn.Linear(1, 1), args=copied, train_dataset=rows, eval_dataset=rows)


@contextlib.contextmanager
def _without_a_trace(args: Any) -> Iterator[Any]:
    """Return the same arguments with a temporary output folder, since a Trainer creates its folder."""
    with tempfile.TemporaryDirectory() as folder:
        copied = copy.copy(args)
        copied.output_dir = folder
        yield copied


# ---- A script, up to its first Trainer -------------------------------------------------------------------------------


class TrainerReached(BaseException):
    """Stops the script, past its `except Exception`; its argument is the text to print."""


def _explain_script(script: str, words: list[str], as_code: bool) -> int:
    if not os.path.isfile(script):
        return complain("explain", f"no script {script!r} (looked in {os.path.abspath(os.path.dirname(script))})")
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.redirection.redirect import install
    from littrainer.trainer import Trainer

    original: Any = Trainer.__init__
    signature = inspect.signature(original)

    def stop(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments.get("args") or TrainingArguments("tmp_trainer")
        with _without_a_trace(given) as bound.arguments["args"]:
            original(*bound.args, **bound.kwargs)
            raise TrainerReached(program(given, script) if as_code else explanation(self, given, words))

    install()
    sys.argv, sys.path[0] = [script, *words], os.path.dirname(os.path.abspath(script))
    Trainer.__init__ = stop  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(script, run_name="__main__")
    except TrainerReached as reached:
        print(reached, end="")
        return 0
    finally:
        Trainer.__init__ = original  # type: ignore[method-assign]
    return complain("explain", f"{script} ended without making a Trainer, so there is nothing to explain")


# ---- In words --------------------------------------------------------------------------------------------------------


def explanation(trainer: Any, args: Any, words: Sequence[str] = ()) -> str:
    """Describe where a Trainer's arguments go, and the Lightning keywords and parts that they result in.

    Parameters:
        trainer: a Trainer that has not trained; the `lightning.Trainer` that its training would use is made and read.
        args: the arguments whose values are shown, as the script gave them.
        words: the command line; arguments that are named there come first.
    """
    from littrainer.arguments.normalization import trackers_in
    from littrainer.arguments.report_to import tracker_label
    from littrainer.engine import lightning_trainer

    def reason(name: str) -> str:
        if name in (trainer.lightning_keywords or {}) or name in (trainer.args.lightning or {}):
            return "given as `lightning`"
        for table in (lightning_trainer.FIXED_KEYWORDS, lightning_trainer.FACTS_OF_LAUNCHERS):
            if name in table:
                return str(table[name][1])
        return "from " + " and ".join(field for field, place in DESTINATIONS.items() if name in place.keywords)

    def names(things: Sequence[Any]) -> str:
        return ", ".join(type(one).__name__ for one in things) or "none"

    lightning: Any = lightning_trainer.build_lightning_trainer(trainer, run=None)
    keywords = lightning_trainer.lightning_keywords(trainer.args, trainer.lightning_keywords)
    rows = [(f"{name}={value!r}", reason(name)) for name, value in keywords.items()]
    rows.append(("max_epochs=...", "num_train_epochs or max_steps, and the length of the data"))
    micro_batches = trainer.args.gradient_accumulation_steps
    window = "each micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    mode = "manual" if trainer.overrides_training_step() else "automatic"
    precision = lightning.precision_plugin
    trackers = ", ".join(map(tracker_label, trackers_in(trainer.args.report_to))) or "none"
    parts = [
        ("strategy", f"{type(lightning.strategy).__name__} on {trainer.args.device}"),
        ("precision plugin", f"{type(precision).__name__} ({precision.precision})"),
        ("optimization", f"{mode}; the optimizer steps after {window}"),
        ("Trainer callbacks", names(trainer.callback_handler.callbacks)),
        ("Lightning callbacks", names(trainer.lightning_callbacks)),
        ("Lightning loggers", names(lightning.loggers)),
        ("trackers", f"{trackers} (report_to)"),
    ]
    options = {word.partition("=")[0].replace("-", "_") for word in words}
    named = {name: value for name, value in args.to_dict().items() if {f"__{name}", f"__no_{name}"} & options}
    changed = [
        (f"{name}={value!r}", f"{DESTINATIONS[name].place.value}: {DESTINATIONS[name].sentence}")
        for name, value in (named | changed_arguments(args)).items()
    ]
    sections = {
        "your arguments, and those that differ from their defaults": changed or [("none", "")],
        "keywords of lightning.Trainer": rows,
        "parts of the training": parts,
    }
    return "\n\n".join("\n".join([title, *_table(lines)]) for title, lines in sections.items()) + "\n"


def changed_arguments(args: Any) -> dict[str, Any]:
    """Return the arguments that differ from their defaults, with masked tokens, in the documented order."""
    from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments

    given, usual = args.to_dict(), Seq2SeqTrainingArguments().to_dict()
    usual["output_dir"] = None
    return {name: given[name] for name, value in usual.items() if name in given and given[name] != value}


def _table(rows: list[tuple[str, str]], widest: int = 44) -> list[str]:
    width = min(max(len(left) for left, _ in rows), widest)
    return [f"  {left:<{width}}  {right}".rstrip() for left, right in rows]


# ---- As a program ----------------------------------------------------------------------------------------------------


def program(args: Any, script: str | None = None) -> str:
    """Return a Lightning program that trains as the arguments say.

    Parameters:
        args: the arguments.
        script: the script that they come from.
    """
    from littrainer.lightning.arguments import is_plain
    from littrainer.lightning.ignored_arguments import ABOUT_DATA, ACTED_ON, LEFT_TO_LIGHTNING

    in_arguments, left_out = [], []
    for name, value in changed_arguments(args).items():
        place, sentence, keywords = DESTINATIONS[name]
        if name in ABOUT_MODELS:
            left_out.append(f"- {name}: {sentence} It needs your model; add it to ARGUMENTS then.")
        elif not is_plain(value):
            left_out.append(f"- {name}: {sentence} It holds objects, which cannot be printed; add them.")
        elif name == "metric_for_best_model" and value not in ("loss", "eval_loss"):
            left_out.append(f"- {name}: {sentence} Give TransformersModule the compute_metrics that returns it.")
        elif name in ABOUT_DATA or name in ACTED_ON or name == "max_grad_norm":
            in_arguments.append(f'    "{name}": {value!r},  # {place.value}: {sentence}\n')
        elif name not in IN_KEYWORDS and not keywords:
            instead = f" Instead: {LEFT_TO_LIGHTNING[name]}." if name in LEFT_TO_LIGHTNING else ""
            left_out.append(f"- {name}: {sentence}{instead}")
    origin = "these arguments" if script is None else f"the arguments of {os.path.basename(script)}"
    heading = [f"The training that {origin} describe, as a plain Lightning program."]
    if left_out:
        heading += ["", "Not in this program:", *left_out]
    if script is not None:
        heading += ["", *OBJECTS_OF_A_SCRIPT]
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    return PROGRAM % {
        "heading": "\n".join(heading).replace("\\", "/").replace('"""', "'''"),
        "arguments": "".join(in_arguments),
        "seed": args.seed,
        "total_steps": _total_steps(args),
        "evaluation_rows": "make_rows()" if evaluates else "None",
        "keywords": "".join(f"        {name}={value},\n" for name, value in _program_keywords(args).items()),
        "validate": "    trainer.validate(module, data, verbose=False)\n" if args.eval_on_start else "",
    }


def _total_steps(args: Any) -> str:
    if args.max_steps > 0:
        return str(args.max_steps)
    share = f"len(rows) {'// ' if args.dataloader_drop_last else '/ '}{args.per_device_train_batch_size}"
    return f"math.ceil({args.num_train_epochs!r} * math.ceil({share} / {args.gradient_accumulation_steps}))"


def _steps(interval: float | None) -> str:
    """Optimizer steps of an interval, as code: below 1 it is a share of all steps."""
    return f"math.ceil(total_steps * {interval!r})" if interval and interval < 1 else str(int(interval or 1))


def _program_keywords(args: Any) -> dict[str, str]:
    from littrainer.lightning.arguments import is_plain

    keywords = {name: repr(find(args)) for name, find in derived_keywords().items()}
    keywords |= {"devices": "1", "max_steps": "total_steps", "max_epochs": "-1", "num_sanity_val_steps": "0"}
    keywords |= {"enable_model_summary": "False", "enable_progress_bar": repr(not args.disable_tqdm)}
    keywords["logger"] = "False" if args.logging_strategy == "no" else f"pl.loggers.CSVLogger({args.output_dir!r})"
    if args.logging_strategy == "steps":
        keywords["log_every_n_steps"] = _steps(args.logging_steps)
    if args.eval_strategy == "steps":
        keywords["val_check_interval"] = f"{args.gradient_accumulation_steps} * {_steps(args.eval_steps)}"
        keywords["check_val_every_n_epoch"] = "None"
    elif args.eval_strategy == "no":
        keywords["limit_val_batches"] = "1.0" if args.eval_on_start else "0"
    if args.full_determinism:
        keywords["deterministic"] = "True"
    if args.save_strategy == "no":
        keywords["enable_checkpointing"] = "False"
    else:
        kept = args.save_total_limit if (args.save_total_limit or 0) > 0 else -1
        settings = f"{args.output_dir!r}, save_top_k={kept}, save_weights_only={args.save_only_model}"
        if args.load_best_model_at_end or args.save_strategy == "best":
            settings += ', monitor="val_loss"'
        elif kept > 0:
            settings += ', monitor="step", mode="max"'
        if args.save_strategy == "steps":
            settings += f", every_n_train_steps={_steps(args.save_steps)}"
        keywords["callbacks"] = f"[pl.callbacks.ModelCheckpoint({settings})]"
    further = args.lightning or {}
    return keywords | {name: repr(value) for name, value in further.items() if is_plain(further)}
