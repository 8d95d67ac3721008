"""The benchmarks work on their smallest sizes, what they record is what tables and curves read, and the pages show it.

Each measurement is taken in this process, of our side alone; no test here looks at a time.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.__main__ import main
from benchmarks.benchmark import Benchmark, Case, Measured
from benchmarks.catalogue import BENCHMARKS
from benchmarks.figures import Figures
from benchmarks.measured import counts, imports, routes, step
from benchmarks.processes import SideProcess, Sides
from benchmarks.sides import EVERY_SIDE, LIGHTNING, OURS, RAW, THEIRS, Side
from benchmarks.tables import PAGES, filled, parts_of

# Their first case shows that the others work.
FIRST_CASE_ONLY = {"step", "startup", "checkpoints", "throughput"}


def measured_here(benchmark: Benchmark, case: Case) -> dict[str, list[Measured]]:
    """A measured case of our side, as an example of all."""
    sides = [side for side in case.sides if not side.folder]
    side = next(side for side in sides if side.library == "littrainer")
    if benchmark.name == "imports":
        # As a process that loads nothing, which is what the others are too as far as the record goes.
        side = imports.PLAIN if case.name == "commands" else replace(side, variant="import json")
    values = benchmark.measure(side, **case.settings)
    assert values and all(isinstance(value, float | int) for value in values.values())
    return {side.name: [values, values] for side in sides}


def smallest_run() -> record.Record:
    """A record of all benchmarks on their smallest sizes."""
    found = record.new_record()
    for name, benchmark in BENCHMARKS.items():
        cases = []
        taken: dict[str, list[Measured]] = {}
        for case in benchmark.short:
            if not taken or name not in FIRST_CASE_ONLY:
                taken = measured_here(benchmark, case)
            one = next(iter(taken.values()))
            cases.append(record.case_entry(case, {side.name: one for side in case.sides if not side.folder}))
        found["benchmarks"][name] = record.benchmark_entry(cases, "short", 1.0)
    return found


def test_a_record_of_the_smallest_sizes_has_all_that_pages_and_curves_show(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.growth import PANELS, draw_growth, points
    from benchmarks.overview import draw

    record.write(smallest_run(), tmp_path / "record.json")
    found = record.read(tmp_path / "record.json")
    parts = parts_of(found)
    for page in PAGES:
        text = page.read_text()
        written = filled(text, parts)
        assert filled(written, parts) == written
        assert written.count("<!-- benchmark:") == text.count("<!-- benchmark:") > 0
    assert all("| littrainer" in parts[name] for name in ("step", "throughput", "startup", "resuming", "checkpoints"))

    drawn = draw_growth(found, tmp_path)
    assert all(panel.title in path.read_text() for panel, path in zip(PANELS, drawn, strict=True))
    draw(found, tmp_path / "measured.svg")
    assert all("Overhead of an" in (tmp_path / f"measured-{theme}.svg").read_text() for theme in ("light", "dark"))
    steps = next(panel for panel in PANELS if panel.curve == "steps")
    sizes = points(steps, record.figures_of(found, BENCHMARKS["startup"]))[OURS.name]
    assert [size for size, _ in sizes] == [2, 20]


def test_the_pages_show_the_figures_of_the_recorded_run() -> None:
    if not record.RECORDED.exists():
        pytest.skip("no run is recorded; `make bench-record` takes one")
    parts = parts_of(record.read(record.RECORDED))
    for page in PAGES:
        assert filled(page.read_text(), parts) == page.read_text(), f"`make bench-docs` writes {page.name} anew"


@pytest.mark.parametrize("side", [RAW, LIGHTNING, THEIRS], ids=lambda side: side.name)
def test_each_side_trains_and_evaluates_the_same_job(side: Side) -> None:
    assert set(step.measure(side, "mlp", steps=4, warmup=2, accumulation=2)) == {"cpu_us", "wall_us"}
    evaluated = BENCHMARKS["evaluation"].measure(side, job="mlp", batches=2, calls=1)
    assert set(evaluated) == {"cpu_ms", "wall_ms"}


def test_a_side_process_measures_what_it_is_asked_and_tells_why_it_cannot() -> None:
    process = SideProcess(RAW)
    try:
        settings: dict[str, Any] = {"job": "mlp", "steps": 4, "warmup": 2}
        assert set(process.measure(BENCHMARKS["step"], RAW, settings)) == {"cpu_us", "wall_us"}
        with pytest.raises(RuntimeError, match="no such job"):
            process.measure(BENCHMARKS["step"], RAW, {**settings, "job": "no such job"})
    finally:
        process.end()


def test_counts_fail_where_a_step_reads_a_value_or_fetches_samples_one_by_one() -> None:
    def figures(**found: float) -> Figures:
        case = record.case_entry(counts.BENCHMARK.short[0], {OURS.name: [found]})
        return Figures({"cases": [case]}, {})

    assert counts.failures(figures(reads=0, requests=1, rows=8)) == []
    assert counts.failures(figures(reads=1, requests=8, rows=8)) == [
        "a step of mlp has 1 reads, where it has to have 0",
        "a step of mlp has 8 requests, where it has to have 1",
    ]


def test_routes_fail_where_a_way_has_become_longer() -> None:
    def failures(**further: float) -> list[str]:
        found = {name: float(most) for name, most in routes.BOUNDS.items()} | further
        case = record.case_entry(routes.BENCHMARK.short[0], {OURS.name: [found]})
        return routes.failures(Figures({"cases": [case]}, {}))

    assert failures() == []
    assert failures(step_files=99) == [f"step_files: 99, at most {routes.BOUNDS['step_files']}"]


def test_a_run_keeps_its_figures_and_fails_where_a_count_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = dict.fromkeys(("calls", "reads", "requests", "rows"), 1.0)
    monkeypatch.setattr(Sides, "measure", lambda *asked: answers)
    kept = tmp_path / "record.json"
    assert main(["--short", "--only", "counts", "--json", str(kept)]) == 1
    printed = capsys.readouterr()
    assert "counts: a step of mlp has 1 reads" in printed.err and "| littrainer | 1 | 1 |" in printed.out
    (case, _) = json.loads(kept.read_text())["benchmarks"]["counts"]["cases"]
    assert list(case["rounds"]) == [side.name for side in EVERY_SIDE if not side.folder]
