"""Work that is carried out once for all tests of a session, whichever pytest-xdist workers they run in."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def run_once(factory: pytest.TempPathFactory, name: str, work: Callable[[Path], object]) -> Path:
    """Return a folder that all workers see, in which the first caller has done the work.

    Parameters:
        factory: the session's `tmp_path_factory`.
        name: of the folder, and so of the work.
        work: is handed the folder, which is empty. The other workers wait for its end.

    Raises:
        Failed: the work has failed in another worker; shows its traceback.
        Exception: the work fails here.
    """
    base = factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / name
    failure = folder.with_name(f"{name}.failure")
    with FileLock(f"{folder}.lock"):
        if not failure.exists():
            # A worker that died in the midst of the work has left its beginning.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                work(folder)
            except BaseException:
                failure.write_text(traceback.format_exc(), encoding="utf-8")
                raise
            failure.touch()
    messages = failure.read_text(encoding="utf-8")
    if messages:
        pytest.fail(f"{name!r}, which is carried out once for all tests, has failed before:\n{messages}", pytrace=False)
    return folder
