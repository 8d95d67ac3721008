"""What a Trainer's arguments turned into, in words: Lightning's keywords and parts, and where each argument went."""

from __future__ import annotations

from typing import Any

from littrainer import engine
from littrainer.arguments.destinations import DESTINATIONS
from littrainer.arguments.report_to import tracker_label, trackers_in
from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments, TrainingArguments

# Keywords that only stand when training begins, with what decides them.
LATER_KEYWORDS = {"max_epochs": ("...", "num_train_epochs or max_steps, and the length of the data")}
INDENT = "  "


def explanation(trainer: Any, args: TrainingArguments) -> str:
    """The report on a Trainer that has not trained.

    Parameters:
        trainer: a Trainer; the `lightning.Trainer` that its training would use is made and read.
        args: the arguments whose values are told, as the script gave them.

    Returns:
        Text of several lines, ending with a newline.
    """
    lightning: Any = engine.build_lightning_trainer(trainer, run=None)
    parts = [
        ("lightning.Trainer keywords", _keyword_lines(trainer)),
        ("what results", _part_lines(trainer, lightning)),
        ("arguments away from their defaults, and where each went", _argument_lines(args)),
    ]
    return "\n\n".join("\n".join([heading, *(INDENT + line for line in lines)]) for heading, lines in parts) + "\n"


def changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Arguments away from their defaults, with plain values and masked tokens, in the documented order."""
    given, usual = args.to_dict(), Seq2SeqTrainingArguments().to_dict()
    usual["output_dir"] = None
    return {name: given[name] for name, value in usual.items() if name in given and given[name] != value}


def _keyword_lines(trainer: Any) -> list[str]:
    keywords = {
        name: (repr(value), _reason(trainer, name))
        for name, value in engine.lightning_keywords(trainer.args, trainer.lightning_keywords).items()
    }
    keywords.update(LATER_KEYWORDS)
    return _table([(f"{name}={value}", reason) for name, (value, reason) in keywords.items()])


def _reason(trainer: Any, name: str) -> str:
    if name in (trainer.lightning_keywords or {}) or name in (trainer.args.lightning or {}):
        return "given as `lightning`"
    if name in engine.FIXED_KEYWORDS:
        return engine.FIXED_KEYWORDS[name][1]
    if name in engine.FACTS_OF_LAUNCHERS:
        return engine.FACTS_OF_LAUNCHERS[name][1]
    sources = [field for field, destination in DESTINATIONS.items() if name in destination.keywords]
    return "from " + " and ".join(sources)


def _part_lines(trainer: Any, lightning: Any) -> list[str]:
    args = trainer.args
    mode = "manual" if trainer.overrides_training_step() else "automatic"
    trackers = ", ".join(map(tracker_label, trackers_in(args.report_to))) or "none"
    loggers = ", ".join(type(logger).__name__ for logger in lightning.loggers) or "none"
    micro_batches = args.gradient_accumulation_steps
    window = "each micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    rows = [
        ("strategy", f"{type(lightning.strategy).__name__} on {args.device}"),
        ("precision plugin", f"{type(lightning.precision_plugin).__name__} ({lightning.precision_plugin.precision})"),
        ("optimization", f"{mode}; the optimizer steps after {window}"),
        ("Trainer callbacks", _names(trainer.callback_handler.callbacks)),
        ("Lightning callbacks", _names(["TrainerEvents", *trainer.lightning_callbacks])),
        ("Lightning loggers", loggers),
        ("trackers", f"{trackers} (report_to)"),
    ]
    return _table(rows)


def _names(callbacks: list[Any]) -> str:
    return ", ".join(callback if isinstance(callback, str) else type(callback).__name__ for callback in callbacks)


def _argument_lines(args: TrainingArguments) -> list[str]:
    rows = []
    for name, value in changed_arguments(args).items():
        place, sentence, _ = DESTINATIONS[name]
        rows.append((f"{name}={value!r}", f"{place.value}: {sentence}"))
    return _table(rows) or ["none"]


def _table(rows: list[tuple[str, str]], widest: int = 44) -> list[str]:
    width = min(max((len(left) for left, _ in rows), default=0), widest)
    return [f"{left:<{width}}  {right}" for left, right in rows]
