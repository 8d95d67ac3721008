"""Writes the tables of the documentation from a record: `python -m benchmarks.tables [record.json]`.

A table stands between two comments in a page, `<!-- benchmark: step -->` and `<!-- end -->`, and is replaced whole.
`<!-- benchmark: the run -->` stands for the sentence that says where the figures are from. A single figure stands
between such comments within a line. What was not measured leaves the page as it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from . import overview, record
from .benchmark import Benchmark
from .catalogue import BENCHMARKS
from .figures import Figures
from .sides import ROOT

PAGES = tuple(ROOT / page for page in ("docs/benchmarks.md", "docs/token-batches.md", "docs/packing.md", "README.md"))
MARKED = re.compile(r"(<!-- benchmark: (?P<name>[^>]+?) -->\n?).*?(<!-- end -->)", re.DOTALL)
SHOWN_VERSIONS = ("Python", "torch", "lightning", "transformers", "littrainer")


def tables_of(benchmark: Benchmark, figures: Figures) -> dict[str, str]:
    return {name: table(figures) for name, table in benchmark.tables.items()}


def described_run(found: record.Record, *benchmarks: str) -> str:
    """Machine, versions, commits and days of the figures of some benchmarks, or of all, in a sentence."""
    machine = found["machine"]
    memory = f", {machine['memory_gib']} GiB" if machine["memory_gib"] else ""
    libraries = ", ".join(f"{name} {found['versions'][name]}" for name in SHOWN_VERSIONS if name in found["versions"])
    entries = [found["benchmarks"][name] for name in benchmarks or found["benchmarks"]]
    taken = dict.fromkeys(f"commit {entry['commit']} on {entry['taken']}" for entry in entries)
    sizes = (
        " Smallest sizes, which say nothing about speed." if any(entry["sizes"] == "short" for entry in entries) else ""
    )
    return (
        f"{machine['processor']}, {machine['cores']} cores{memory}, {machine['system']}, one thread for each process; "
        f"{libraries}; {' and '.join(taken)}.{sizes}"
    )


def parts_of(found: record.Record) -> dict[str, str]:
    """What can stand between markers, by the name in them."""
    parts: dict[str, str] = {}
    for name, benchmark in BENCHMARKS.items():
        if name in found["benchmarks"]:
            parts |= tables_of(benchmark, record.figures_of(found, benchmark))
    detail = overview.table(found, overview.DETAILED, overview.DETAILED_SIDES)
    return {**parts, "the run": described_run(found), "in-short": overview.table(found), "in-detail": detail}


def filled(page: str, parts: dict[str, str]) -> str:
    """A page with the parts of a record between its markers.

    Raises:
        KeyError: a marker names no part of the record.
    """

    def replacement(marked: re.Match[str]) -> str:
        name = marked["name"]
        if name not in parts:
            raise KeyError(f"the record has no {name!r}, which a page asks for; it has {sorted(parts)}")
        part = parts[name].strip()
        if not part:
            return marked[0]
        return f"{marked[1]}\n{part}\n\n{marked[3]}" if marked[1].endswith("\n") else f"{marked[1]}{part}{marked[3]}"

    return MARKED.sub(replacement, page)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__.splitlines()[0])
    parser.add_argument("record", nargs="?", type=Path, default=record.RECORDED, help="the file that --json wrote")
    parts = parts_of(record.read(parser.parse_args().record))
    for page in PAGES:
        text = page.read_text()
        page.write_text(filled(text, parts))
        print(f"{page.relative_to(ROOT)}: {len(MARKED.findall(text))} parts", file=sys.stderr)


if __name__ == "__main__":
    main()
