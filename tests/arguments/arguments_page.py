"""Writes the page that lists every argument: `python -m tests.arguments.arguments_page > docs/arguments.md`."""

from __future__ import annotations

import dataclasses

from littrainer.arguments.earlier_names import EARLIER_NAMES, EarlierName
from littrainer.arguments.fields import get_default, list_topics
from littrainer.arguments.rules import SUPPORTED_VALUES
from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments

INTRODUCTION = """\
# Arguments

`TrainingArguments` takes these arguments in this positional order, with the names and defaults of transformers;
`warmup_ratio` and `logging_dir` are from earlier 5.x releases, and those after them in their table are littrainer's.
`Seq2SeqTrainingArguments` adds five.

<!-- Written by `python -m tests.arguments.arguments_page` from arguments/fields.py. -->

- Every argument is supported, or is for your script alone. {refused}
- Unknown names raise `TypeError` with the nearest known name.
- `littrainer explain` prints what an argument does and which part of a training reads it.
"""

EARLIER_SPELLINGS = """\
## Earlier spellings

The constructor, the command line, dicts, files and attributes accept each earlier name, with a `FutureWarning` that
says what to write today. `ValueError` is raised for a value that contradicts today's argument, or that the last column,
if it has any, does not have.
"""

SETTLED_DIFFERENCES = """\
If releases differ:

- `report_to=None` is refused, as in transformers 5; in 4 it meant all installed trackers.
- `warmup_steps` below 1 is a share of all steps; `1.0` is one step.
- `warmup_ratio=0.0` leaves `warmup_steps` alone. Above 0 it overrides it, as in 5.3, with a warning if you give both.
- `optim="adamw_hf"` is read as `adamw_torch` and `adamw_apex_fused` as `adamw_torch_fused`, with a warning.

The Trainer takes `tokenizer=` for `processing_class=` and `train(model_path=...)` for `resume_from_checkpoint=`.
`trainer.tokenizer`, `prediction_loop` and `num_tokens` still work. Overrides
[may lack newer parameters](api/compatibility.md#override-points); without `num_items_in_batch` the loss counts as the
mean of the micro-batch.
"""


def arguments_page() -> str:
    """Return the page as Markdown, with a table for each topic."""
    return "\n".join(
        [
            INTRODUCTION.format(refused=_refused()),
            *_topic_tables(),
            EARLIER_SPELLINGS,
            _earlier_names_table(),
            SETTLED_DIFFERENCES,
        ]
    )


def _earlier_names_table() -> str:
    lines = ["| earlier name | today | accepts only |", "| --- | --- | --- |"]
    for name, rule in EARLIER_NAMES.items():
        today = rule.advice.removeprefix("use ").removeprefix("drop it, ").replace("|", "\\|")
        lines.append(f"| `{name}` | {today} | {_accepted_values(rule)} |")
    return "\n".join([*lines, ""])


def _accepted_values(rule: EarlierName) -> str:
    if rule.replaced_by is not None or rule.harmless:
        return ""
    return ", ".join(f"`{value!r}`" for value in rule.idle)


def _topic_tables() -> list[str]:
    help_and_default = {field.name: field for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    tables = []
    for topic in list_topics(Seq2SeqTrainingArguments):
        lines = [
            f"## {(topic.__doc__ or '').rstrip('.')}",
            "",
            "| argument | default | what it does |",
            "| --- | --- | --- |",
        ]
        for field in dataclasses.fields(topic):
            field = help_and_default[field.name]
            cells = (f"`{field.name}`", f"`{get_default(field)!r}`", field.metadata["help"])
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        tables.append("\n".join([*lines, ""]))
    return tables


def _refused() -> str:
    (name,) = SUPPORTED_VALUES
    values = " or ".join(f"`{value}`" for value in SUPPORTED_VALUES[name])
    return f"Only `{name}` accepts fewer values: {values}, or it raises `NotImplementedError`."


if __name__ == "__main__":
    print(arguments_page(), end="")
