"""What is carried out once for all tests is carried out by the first that asks, and its failure is everybody's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.once_per_session import carried_out_once


class Base:
    """A folder in the place of a session's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def getbasetemp(self) -> Path:
        return self.folder


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Base:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return Base(tmp_path)


def test_the_first_that_asks_does_the_work_and_the_others_find_it_done(
    factory: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = carried_out_once(factory, "counting", lambda folder: (folder / "done").write_text("once"))
    assert (folder / "done").read_text() == "once"
    # Another worker has a folder of its own beside this one's.
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    other = Base(tmp_path / "popen-gw1")
    assert carried_out_once(other, "counting", lambda folder: (folder / "done").write_text("twice")) == folder
    assert (folder / "done").read_text() == "once"


def test_a_failure_is_shown_to_all_that_ask_without_another_try(factory: Base) -> None:
    tried = []

    def work(folder: Path) -> None:
        tried.append(folder)
        raise ValueError("sample 17 is damaged")

    with pytest.raises(ValueError, match="sample 17"):
        carried_out_once(factory, "reading", work)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)'reading'.*in work.*ValueError: sample 17 is damaged"):
        carried_out_once(factory, "reading", work)
    assert len(tried) == 1


def test_work_that_a_killed_process_has_begun_is_done_anew(factory: Base, tmp_path: Path) -> None:
    begun = (
        "import os, pathlib, sys\nfrom tests.scenarios.test_once_per_session import Base, carried_out_once\n"
        "carried_out_once(Base(pathlib.Path(sys.argv[1])), 'work',"
        " lambda folder: ((folder / 'half').touch(), os._exit(9)))"
    )
    root = str(Path(__file__).resolve().parents[2])
    assert subprocess.run([sys.executable, "-c", begun, str(tmp_path)], cwd=root, timeout=300).returncode == 9
    assert (tmp_path / "work" / "half").exists()
    folder = carried_out_once(factory, "work", lambda folder: (folder / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
