"""Python processes for tests of the redirection, which changes the imports of a process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import littrainer

SOURCE_ROOT = Path(littrainer.__file__).parents[1]


def environment(**changes: str) -> dict[str, str]:
    """Return an environment with littrainer on the path and without redirection."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "PYTHONPATH": str(SOURCE_ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **changes}


def run_python(*arguments: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in the folder `cwd`, with `changes` to its environment."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment(**changes), capture_output=True, text=True, timeout=300
    )


def facts_of(script: str, cwd: Path, **changes: str) -> Any:
    """Run a script and return the JSON value in the last line of its output."""
    path = cwd / "collect_facts.py"
    path.write_text(script)
    done = run_python(str(path), cwd=cwd, **changes)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
