"""What transformers' side has recorded is read again until something that it depends on changes."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fidelity import conftest, kept_records
from tests.fidelity.differences import differing_aspects, read_record
from tests.fidelity.kept_records import KeptRecords, key_of, records_kept_in_cache
from tests.fidelity.record import Record, random_state
from tests.fidelity.side import ORACLE

IN_RESUME, IMPORTING_RESUME = "resumed_while_accumulating", "resumed_with_batches_rebalanced"
ELSEWHERE = "schedule_cosine"
NAMES = [IN_RESUME, IMPORTING_RESUME, ELSEWHERE]

RECORD = Record(weights=random_state(), events=[("on_train_begin", 0, 0.5, ("should_log",))])


def left_by_a_run(folder: Path, record: Record = RECORD, names: list[str] = NAMES, processes: int = 1) -> Path:
    for rank in range(processes):
        records = folder / f"rank{rank}" if processes > 1 else folder
        records.mkdir(parents=True)
        for name in names:
            (records / f"{name}.pickle").write_bytes(pickle.dumps(record))
    return folder


@pytest.fixture
def kept(tmp_path: Path) -> KeptRecords:
    """All of `NAMES` are kept."""
    (tmp_path / "kept").mkdir()
    kept = KeptRecords(tmp_path / "kept")
    kept.keep(left_by_a_run(tmp_path / "first"), kept.put_into(tmp_path / "first", NAMES))
    return kept


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, to be changed."""
    for package in ("fidelity", "scenarios"):
        shutil.copytree(kept_records.TESTS / package, tmp_path / "tests" / package)
    monkeypatch.setattr(kept_records, "TESTS", tmp_path / "tests")
    return tmp_path / "tests"


def add_a_line(file: Path) -> None:
    file.write_text(f"{file.read_text()}\nCHANGED = True\n")


def test_a_kept_record_is_the_one_that_was_made(kept: KeptRecords, tmp_path: Path) -> None:
    assert kept.put_into(tmp_path / "second", NAMES) == {}
    for name in NAMES:
        read = read_record(tmp_path / "second", name)
        assert read.events == RECORD.events and differing_aspects(RECORD, read) == {}


def test_each_of_several_processes_has_its_record_back(kept: KeptRecords, tmp_path: Path) -> None:
    of_two = KeptRecords(kept.folder, processes=2)
    keys = of_two.put_into(tmp_path / "two", NAMES)
    assert list(keys) == NAMES
    left_by_a_run(tmp_path / "two", names=[ELSEWHERE], processes=2)
    (tmp_path / "two" / "rank0" / f"{IN_RESUME}.pickle").write_bytes(pickle.dumps(RECORD))
    of_two.keep(tmp_path / "two", keys)
    assert list(of_two.put_into(tmp_path / "again", NAMES)) == [IN_RESUME, IMPORTING_RESUME]
    assert {path.parent.name for path in (tmp_path / "again").rglob("*.pickle")} == {"rank0", "rank1"}
    assert kept.put_into(tmp_path / "one", NAMES) == {}


def test_a_changed_file_of_scenarios_makes_its_records_and_those_of_importing_files_anew(
    sources: Path, kept: KeptRecords, tmp_path: Path
) -> None:
    add_a_line(sources / "fidelity" / "cases" / "resume.py")
    keys = kept.put_into(tmp_path / "second", NAMES)
    assert list(keys) == [IN_RESUME, IMPORTING_RESUME]
    kept.keep(left_by_a_run(tmp_path / "third", Record(events=["anew"]), list(keys)), keys)
    assert kept.put_into(tmp_path / "fourth", NAMES) == {}
    assert read_record(tmp_path / "fourth", IN_RESUME).events == ["anew"]
    assert len(list(kept.folder.iterdir())) == len(NAMES), "what was kept before is gone"


@pytest.mark.parametrize("file", ["fidelity/side.py", "scenarios/models.py"])
def test_what_all_scenarios_use_makes_all_records_anew(
    sources: Path, kept: KeptRecords, tmp_path: Path, file: str
) -> None:
    add_a_line(sources / file)
    assert list(kept.put_into(tmp_path / "second", NAMES)) == NAMES


def test_another_release_of_a_package_makes_all_records_anew(
    kept: KeptRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = kept_records.machine().replace("transformers 5.", "transformers 6.")
    assert other != kept_records.machine()
    monkeypatch.setattr(kept_records, "machine", lambda: other)
    assert list(kept.put_into(tmp_path / "second", NAMES)) == NAMES


def test_a_record_made_while_its_source_was_edited_is_not_taken_for_the_edited_one(
    sources: Path, tmp_path: Path
) -> None:
    kept = KeptRecords(tmp_path)
    keys = kept.put_into(tmp_path / "first", [ELSEWHERE])
    add_a_line(sources / "fidelity" / "cases" / "optimization.py")
    kept.keep(left_by_a_run(tmp_path / "first"), keys)
    assert kept.put_into(tmp_path / "second", [ELSEWHERE]) == {ELSEWHERE: key_of(ELSEWHERE)}


def test_a_scenario_that_raised_is_run_again(tmp_path: Path) -> None:
    kept = KeptRecords(tmp_path)
    keys = kept.put_into(tmp_path / "first", NAMES)
    kept.keep(left_by_a_run(tmp_path / "first", Record(error="ValueError: out of memory")), keys)
    assert kept.put_into(tmp_path / "second", NAMES) == keys


def test_processes_of_transformers_are_started_for_what_is_not_kept_alone(
    kept: KeptRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> SimpleNamespace:
        """Leave what the process of a side would leave."""
        side, mode, folder, *names = command[command.index("tests.fidelity.runner") + 1 :]
        started.append([side, mode, *names])
        for name in names:
            Path(folder, f"{name}.pickle").write_bytes(pickle.dumps(RECORD))
        return SimpleNamespace(wait=lambda seconds: 0)

    monkeypatch.setattr(conftest.subprocess, "Popen", start)
    ours = [["littrainer", "automatic", *NAMES], ["littrainer", "manual", ELSEWHERE]]
    wanted = {ORACLE: NAMES, "automatic": NAMES, "manual": [ELSEWHERE]}
    conftest.run_all(tmp_path / "nothing missing", wanted, kept)
    assert started == ours
    started.clear()
    kept.file(ELSEWHERE).unlink()
    conftest.run_all(tmp_path / "one missing", wanted, kept)
    assert started == [[ORACLE, "automatic", ELSEWHERE], *ours]
    started.clear()
    conftest.run_all(tmp_path / "fresh", wanted, KeptRecords(kept.folder, fresh=True))
    assert started == [[ORACLE, "automatic", *NAMES], *ours]
    conftest.run_all(tmp_path / "afterwards", wanted, kept)
    assert started == [[ORACLE, "automatic", *NAMES], *ours, *ours]
    assert read_record(tmp_path / "afterwards" / ORACLE, ELSEWHERE).events == RECORD.events


def test_records_are_kept_in_the_cache_of_pytest_where_there_is_one(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    kept = records_kept_in_cache(pytestconfig, tmp_path, processes=2)
    has_cache = pytestconfig.pluginmanager.hasplugin("cacheprovider")
    assert (kept.folder == tmp_path) is not has_cache
    assert kept.processes == 2 and kept.fresh is pytestconfig.getoption("--fresh-oracle")
