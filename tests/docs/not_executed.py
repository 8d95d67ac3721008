"""Blocks of pages that are not executed, each with the reason."""

from __future__ import annotations

NOT_EXECUTED: dict[str, dict[str, str]] = {
    "docs/architecture.md": {"script ──► TrainingArguments": "a drawing"},
    "docs/callbacks.md": {"ValueError: no such file": "an error; tests/callbacks/test_handler.py"},
    "docs/check.md": {
        "passed     train_dataset: 1,000": "pages of several trainings in one; tests/check/test_checking.py"
    },
    "docs/compare.md": {
        "equal, bit": "what verify prints; tests/commands/test_verify.py",
        "different: first": "what verify prints; tests/commands/test_verify.py",
        "equal but": "what verify prints on a GPU; tests/commands/test_verify.py",
        "The logs differ": "what compare prints; tests/commands/test_compare.py",
    },
    "docs/checkpoints.md": {"Interrupted at": "what Ctrl-C prints; tests/loop/test_interruption_report.py"},
    "docs/remote-folders.md": {
        'args = TrainingArguments("s3://': "it needs a bucket; tests/checkpoint/test_remote.py",
    },
    "docs/restarts.md": {
        "littrainer run --devices 4:8": "a run in eight processes; tests/distributed/test_restarts.py",
        "littrainer: process 3 of 8": "what it prints; tests/distributed/test_restarts.py",
    },
}
"""page -> the beginning of a block's code or of a command line -> why it is not executed."""
OUTPUT_TESTED_BY: dict[str, str] = {
    "docs/errors.md": "tests/runtime/test_page.py",
}
"""page -> the test that holds all its blocks of text against what is printed, which no code on the page does."""


def reason_for(page: str, text: str) -> str | None:
    """Why a block's code, or a command line, is not executed, or None where it is."""
    rows = NOT_EXECUTED.get(page, {})
    return next((reason for beginning, reason in rows.items() if text.startswith(beginning)), None)
