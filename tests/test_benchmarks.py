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
from benchmarks.benchmark import Benchmark, Case, Measured, Processes
from benchmarks.catalogue import BENCHMARKS
from benchmarks.figures import Figures
from benchmarks.measured import counts, imports, routes, step
from benchmarks.processes import SideProcess, Sides, environment_of
from benchmarks.rounds import take_turns
from benchmarks.sides import EARLIER, EVERY_SIDE, LIGHTNING, OURS, RAW, THEIRS, Side
from benchmarks.tables import PAGES, RECORDED, filled, parts_of

# Their first case shows that the others work.
FIRST_CASE_ONLY = {"step", "startup", "checkpoints", "throughput"}


def measured_here(benchmark: Benchmark, case: Case) -> dict[str, list[Measured]]:
    """A case measured of our side, which stands for all of them."""
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

    record.write(smallest_run(), tmp_path / "record.json")
    found = record.read(tmp_path / "record.json")
    parts = parts_of(found)
    for page in PAGES:
        text = page.read_text()
        written = filled(text, parts)
        assert filled(written, parts) == written
        assert written.count("<!-- benchmark:") == text.count("<!-- benchmark:") > 0
    assert all("| littrainer" in parts[name] for name in ("step", "throughput", "startup", "resuming", "checkpoints"))

    draw_growth(found, tmp_path / "growth.svg")
    drawn = (tmp_path / "growth.svg").read_text()
    assert all(panel.title in drawn for panel in PANELS)
    steps = next(panel for panel in PANELS if panel.curve == "steps")
    sizes = points(steps, record.figures_of(found, BENCHMARKS["startup"]))[OURS.name]
    assert [size for size, _ in sizes] == [2, 20]


def test_each_curve_has_sizes_enough_to_show_how_it_grows() -> None:
    from benchmarks.growth import PANELS

    for panel in PANELS:
        cases = [case for case in BENCHMARKS[panel.benchmark].full if case.curve == panel.curve]
        assert len(cases) > 2 and all(panel.setting in case.settings for case in cases)


def test_the_pages_show_the_figures_of_the_recorded_run() -> None:
    if not RECORDED.exists():
        pytest.skip("no run is recorded; `make bench-record` takes one")
    parts = parts_of(record.read(RECORDED))
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


def test_the_earlier_release_comes_first_on_the_path_of_its_own_processes() -> None:
    assert environment_of(EARLIER)["PYTHONPATH"].split(":")[0] == str(EARLIER.folder)
    assert str(EARLIER.folder) not in environment_of(THEIRS)["PYTHONPATH"]


def test_sides_take_turns_and_each_round_begins_with_another_one() -> None:
    asked = []

    def measure(side: Side) -> Measured:
        asked.append(side.name)
        return {"asked": float(len(asked))}

    found = take_turns([RAW, OURS, THEIRS], 2, measure, rehearse=True)
    assert asked == ["raw PyTorch", "littrainer", "transformers"] * 2 + ["littrainer", "transformers", "raw PyTorch"]
    assert [each["asked"] for each in found["raw PyTorch"]] == [4.0, 9.0]


def test_sides_are_compared_within_a_round() -> None:
    rounds = {"ours": [{"s": 1.0}, {"s": 20.0}, {"s": 3.0}], "theirs": [{"s": 2.0}, {"s": 40.0}, {"s": 3.0}]}
    case = {"name": "case", "title": "", "curve": "", "settings": {}, "rounds": rounds}
    figures = Figures({"cases": [case]}, {})
    assert figures.median("case", "ours", "s") == 3.0
    assert figures.ratio("case", "ours", "theirs", "s") == 0.5
    assert figures.difference("case", "ours", "theirs", "s") == -1.0
    assert figures.spread("case", "ours", "s") == "1 to 20"


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


def test_figures_of_another_machine_are_not_mixed_with_these(tmp_path: Path) -> None:
    of_another = record.new_record()
    of_another["machine"]["cores"] = 1000
    record.write(of_another, tmp_path / "record.json")
    with pytest.raises(ValueError, match="figures of other machine"):
        record.begun_or_new(tmp_path / "record.json")


def test_a_table_that_the_record_lacks_is_named() -> None:
    with pytest.raises(KeyError, match="the record has no 'step'"):
        filled("<!-- benchmark: step -->\n<!-- end -->\n", {})


def test_every_case_says_where_it_runs_and_has_a_name_of_its_own() -> None:
    for benchmark in BENCHMARKS.values():
        for cases in (benchmark.full, benchmark.short):
            names = [case.name for case in cases]
            assert len(set(names)) == len(names)
            assert all(isinstance(case.processes, Processes) for case in cases)
            json.dumps([case.settings for case in cases])
