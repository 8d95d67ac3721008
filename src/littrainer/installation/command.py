"""The command `littrainer env`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from littrainer.commands.command_parser import CommandParser
from littrainer.installation import devices
from littrainer.installation.machine import machine
from littrainer.installation.packages import (
    PACKAGES,
    findings_about_copies,
    findings_about_ranges,
    own_place,
    versions,
)
from littrainer.installation.variables import variables, with_tilde

DESCRIPTION = (
    "Say what is installed here and what of it may matter to a training: versions, devices, environment variables, and "
    "what does not fit together. The text is Markdown, to be pasted into a bug report. Secrets are hidden and the home "
    "folder is written as ~; look through it before you publish it."
)


def build_parser() -> CommandParser:
    """The parser of the command line."""
    parser = CommandParser("littrainer env", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print the same facts as one JSON object")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer env`; returns the exit status."""
    options = build_parser().parse_args(words)
    facts = installation()
    print(json.dumps(facts, indent=2) if options.json else as_markdown(facts))
    return 0


def installation() -> dict[str, Any]:
    """All facts, by section. What cannot be found out is told in its place, and keeps nothing else from being told."""
    asked = devices.start()
    facts: dict[str, Any] = {
        "littrainer": _told(own_place),
        "machine": machine(),
        "packages": _told(versions),
        "environment variables": _told(variables),
        "findings": [*_findings(findings_about_ranges), *_findings(findings_about_copies)],
    }
    torch = devices.read(asked)
    if "error" in torch:
        facts["findings"].insert(0, str(torch["error"]))
    order = ("littrainer", "findings", "machine", "torch", "packages", "environment variables")
    facts["torch"] = torch
    shown: dict[str, Any] = _without_home({name: facts[name] for name in order})
    return shown


def as_markdown(facts: dict[str, Any]) -> str:
    """The facts as text to be pasted into an issue."""
    own = facts["littrainer"]
    lines = [f"### littrainer {own.get('version', '')}".rstrip(), ""]
    if "error" in own:
        lines.append(f"- {_in_one_line(own['error'])}")
    else:
        lines.append(f"- {own['folder']}{', editable' if own['editable'] else ''}")
        lines += ["- not installed as a package"] if not own["installed"] else []
    lines += ["", "### Findings", "", *[f"- {_in_one_line(finding)}" for finding in facts["findings"] or ["none"]]]
    lines += ["", "### Machine", "", *_items(facts["machine"])]
    lines += ["", "### torch", "", *_items(facts["torch"])]
    lines += ["", "### Packages", ""]
    packages = facts["packages"]
    if "error" in packages:
        lines.append(f"- {_in_one_line(packages['error'])}")
    else:
        lines += [f"- {group}: {_list_of(names)}" for group, names in packages.items()]
        missing = [name for group in PACKAGES for name in PACKAGES[group] if name not in packages.get(group, {})]
        lines += [f"- not installed: {', '.join(missing)}"] if missing else []
    lines += ["", "### Environment variables", ""]
    variables_set = facts["environment variables"]
    lines += [f"- {_as_code(f'{name}={value}')}" for name, value in variables_set.items()] or ["- none"]
    return "\n".join(lines)


def _items(facts: dict[str, Any]) -> list[str]:
    texts = {name: "; ".join(fact) if isinstance(fact, list) else fact for name, fact in facts.items()}
    return [f"- {name}: {_in_one_line(text)}" for name, text in texts.items()]


def _list_of(names: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in names.items())


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def _as_code(text: str) -> str:
    """The text between backticks, in one line and without what would steer a terminal."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def _told(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return ask()
    except Exception as error:
        return {"error": _in_words(ask.__name__, error)}


def _findings(ask: Callable[[], Iterator[str]]) -> list[str]:
    found = []
    try:
        for finding in ask():
            found.append(finding)
    except Exception as error:
        found.append(_in_words(ask.__name__, error))
    return found


def _in_words(what: str, error: Exception) -> str:
    return f"{what.replace('_', ' ')} cannot be found out ({type(error).__name__}: {error})"


def _without_home(facts: Any) -> Any:
    if isinstance(facts, dict):
        return {name: _without_home(fact) for name, fact in facts.items()}
    if isinstance(facts, list):
        return [_without_home(fact) for fact in facts]
    return with_tilde(facts) if isinstance(facts, str) else facts
