"""Writes the page that lists every argument: `python -m littrainer.arguments.documentation > docs/arguments.md`."""

from __future__ import annotations

import dataclasses
from typing import Any

from littrainer.arguments import fields as all_topics
from littrainer.arguments.support import (
    HONOURED_VALUES,
    NOT_YET_SUPPORTED,
    NOT_YET_SUPPORTED_ACCELERATOR_ENTRIES,
)
from littrainer.arguments.training_arguments import TrainingArguments

INTRODUCTION = """\
# Arguments

`TrainingArguments` takes these arguments, in this positional order. Names, order and defaults are those of
transformers; `warmup_ratio` and `logging_dir` come from earlier 5.x releases and `lightning` is littrainer's own.

An argument is honoured or refused, never ignored: one marked "not yet" raises `NotImplementedError` when it is set away
from its default, and so does a value that is not listed where the table lists values. Unknown names raise `TypeError`
with the nearest known name.

Written by `python -m littrainer.arguments.documentation`; edit the help beside the field instead of this page.
"""


def arguments_page() -> str:
    """The page as Markdown, one table for each topic, ending with a newline."""
    return "\n".join([INTRODUCTION, *_topic_tables()])


def _topic_tables() -> list[str]:
    help_and_default = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    tables = []
    for topic in reversed(all_topics.ArgumentFields.__bases__):
        lines = [f"## {(topic.__doc__ or '').rstrip('.')}", "", "| argument | default | status | what it does |"]
        lines.append("| --- | --- | --- | --- |")
        for field in dataclasses.fields(topic):
            field = help_and_default[field.name]
            cells = (f"`{field.name}`", f"`{_default(field)!r}`", _status(field.name), field.metadata["help"])
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        tables.append("\n".join([*lines, ""]))
    return tables


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _status(name: str) -> str:
    if name in NOT_YET_SUPPORTED:
        return f"not yet ({NOT_YET_SUPPORTED[name]})"
    if name in HONOURED_VALUES:
        return "honoured for " + ", ".join(f"`{value}`" for value in HONOURED_VALUES[name])
    if name == "accelerator_config" and NOT_YET_SUPPORTED_ACCELERATOR_ENTRIES:
        return "honoured but for " + ", ".join(f"`{entry}`" for entry in NOT_YET_SUPPORTED_ACCELERATOR_ENTRIES)
    return "honoured"


if __name__ == "__main__":
    print(arguments_page(), end="")
