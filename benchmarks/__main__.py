"""What littrainer costs, beside transformers, plain Lightning and a raw PyTorch loop.

    python -m benchmarks                          all benchmarks: about 25 minutes on two quiet cores
    python -m benchmarks --only step --rounds 9   one of them, with more rounds
    python -m benchmarks --short                  all of them with the smallest sizes, to see that they work: a minute
    python -m benchmarks --json record.json       keeps each round's figures; later --only runs renew parts of it

`python -m benchmarks.tables record.json` and `python -m benchmarks.growth record.json` write the tables and the curves
of the documentation from such a file. Times are never gates; the exit status is 1 where a benchmark failed, or where
something that is counted is not as it has to be.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

from . import record
from .benchmark import Benchmark, Case, Processes
from .catalogue import BENCHMARKS
from .processes import Sides, side_processes
from .rounds import take_turns
from .tables import described_run, tables_of


def take_case(benchmark: Benchmark, case: Case, sides: Sides, rounds: int, short: bool) -> dict[str, object]:
    """One case of a benchmark, on the sides that are there; the short form has no time for the earlier release."""
    present = [side for side in case.sides if side.is_present and not (short and side.folder)]
    sides.start(case, present)
    kept = case.processes in (Processes.KEPT, Processes.PAIR)
    measured = take_turns(
        present, rounds, lambda side: sides.measure(benchmark, case, side), rehearse=kept and not short
    )
    return record.case_entry(case, measured)


def take(benchmark: Benchmark, sides: Sides, short: bool, rounds: int | None) -> dict[str, object]:
    """A benchmark's part of the record."""
    began = time.perf_counter()
    cases = []
    for case in benchmark.short if short else benchmark.full:
        own_rounds = rounds or (1 if short else case.rounds or benchmark.rounds)
        cases.append(take_case(benchmark, case, sides, own_rounds, short))
    return record.benchmark_entry(cases, "short" if short else "full", time.perf_counter() - began)


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__.splitlines()[0],
        epilog="Benchmarks: " + "; ".join(f"{name}: {each.question}" for name, each in BENCHMARKS.items()),
    )
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), metavar="NAME", help="these benchmarks alone")
    parser.add_argument("--rounds", type=int, help="times each side takes its turn (default: the benchmark's own)")
    parser.add_argument("--short", action="store_true", help="the smallest sizes, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where each round's figures are kept")
    options = parser.parse_args(words)
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main(words: list[str] | None = None) -> int:
    options = parse_options(words)
    found = record.begun_or_new(options.json)
    wrong: list[str] = []
    with side_processes() as sides:
        for name in options.only or BENCHMARKS:
            benchmark = BENCHMARKS[name]
            try:
                found["benchmarks"][name] = take(benchmark, sides, options.short, options.rounds)
                if options.json:
                    record.write(found, options.json)
                figures = record.figures_of(found, benchmark)
                print(f"\n## {benchmark.question}\n\n{described_run(found, name)}\n")
                print("\n".join(tables_of(benchmark, figures).values()), flush=True)
                wrong += [f"{name}: {failure}" for failure in benchmark.failures(figures)]
            except Exception:
                # The others are taken all the same: a run is long.
                traceback.print_exc()
                wrong.append(f"{name} failed")
    for each in wrong:
        print(each, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
