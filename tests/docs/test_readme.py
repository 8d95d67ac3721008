"""Counts in the README and names on the installation page are right."""

from __future__ import annotations

import re

import tomllib

from tests.docs.blocks import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALLATION = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")


def test_the_scenarios_are_as_many_as_the_readme_says() -> None:
    from tests.fidelity.scenarios import COMPARED

    (scenarios,) = re.findall(r"(\d+) short trainings of every kind", README)
    assert int(scenarios) == len(COMPARED), "write this into the README"


def test_the_installation_page_has_a_row_for_each_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (table,) = re.findall(r"^\| extra \| for \|\n\|.*\n((?:\|.*\n)+)", INSTALLATION, re.MULTILINE)
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(extras)
