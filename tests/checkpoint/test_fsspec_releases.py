"""Remote runs with earlier releases of fsspec, each in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.releases import ROOT

LINES = (ROOT / "tests" / "fsspec-releases.txt").read_text("utf-8").splitlines()
RELEASES = [line for line in LINES if not line.startswith("#")]
VARIABLE = "LITTRAINER_FSSPEC"
"""The variable with the folder of the releases; by default `make test-all`'s."""
TRIED = ("empty_disk", "best_model", "lead_out", "damaged_download", "short_read", "right_to_delete", "never_replaced")


@pytest.mark.parametrize("release", RELEASES)
def test_remote_runs_work_with_an_earlier_fsspec(release: str) -> None:
    folder = Path(os.environ.get(VARIABLE) or ROOT / ".venv" / "fsspec") / release
    if not folder.is_dir():
        pytest.skip(f"fsspec {release} is not installed in its folder: `make test-all` does it")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    program = (
        f"import fsspec, pytest, sys; assert fsspec.__version__ == {release!r}; sys.exit(pytest.main(sys.argv[1:]))"
    )
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "tests/checkpoint/test_remote.py", "-k", " or ".join(TRIED)]
    command = [sys.executable, "-c", program, *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
