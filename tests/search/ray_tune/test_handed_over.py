from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from littrainer.checkpoint.run_lock import CLAIM_NAME
from littrainer.search.ray_tune.handed_over import CONTENT, PREFIX, delete_abandoned, folder_to_hand_over


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_nothing_stays_of_a_checkpoint_that_has_been_handed_over(temporary: Path) -> None:
    with pytest.raises(SystemExit), folder_to_hand_over() as folder:
        (Path(folder) / "weights").touch()
        raise SystemExit(0)
    assert list(temporary.iterdir()) == []


def test_a_checkpoint_that_is_being_handed_over_is_not_deleted_by_another_trial(temporary: Path) -> None:
    with folder_to_hand_over() as folder:
        delete_abandoned()
        assert list(Path(folder).iterdir()) == [] and len(list(temporary.iterdir())) == 1


def test_what_a_killed_process_has_left_is_deleted(temporary: Path) -> None:
    pytest.importorskip("fcntl")
    # As it lies there after a kill: the file of the claim, which nobody holds, and the checkpoint.
    left = temporary / f"{PREFIX}left"
    (left / CONTENT / "checkpoint-4").mkdir(parents=True)
    (left / CLAIM_NAME).touch()
    other = temporary / "littrainer-of-something-else" / CONTENT
    other.mkdir(parents=True)
    delete_abandoned()
    assert not left.exists() and other.is_dir()
