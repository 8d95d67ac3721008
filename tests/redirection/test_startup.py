"""Redirection of child processes."""

import gc
from pathlib import Path

import pytest

from littrainer.redirection import redirect
from tests.compat.processes import SOURCE_ROOT, facts_of, run_python
from tests.scenarios.trainers import quiet_trainer

PRINT_IS_REDIRECTED = "import sys; print(any(type(finder).__name__ == 'RedirectFinder' for finder in sys.meta_path))"
PRINT_LOADED = "; print([name for name in ('torch', 'transformers', 'lightning') if name in sys.modules])"

PARENT = f"""
import littrainer.auto
import gc, json, multiprocessing, subprocess, sys

def redirected(_=None):
    return any(type(finder).__name__ == "RedirectFinder" for finder in sys.meta_path)

if __name__ == "__main__":
    facts = {{"gc threshold": gc.get_threshold()[0]}}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        facts["spawned"] = pool.map(redirected, [None])[0]
    command = [sys.executable, "-c", {PRINT_IS_REDIRECTED + PRINT_LOADED!r}]
    facts["subprocess"] = " ".join(subprocess.run(command, capture_output=True, text=True).stdout.split())
    print(json.dumps(facts))
"""


def test_a_redirected_process_has_a_higher_gc_threshold_and_children_that_do_not_load_torch(tmp_path: Path) -> None:
    facts = facts_of(PARENT, tmp_path)
    assert facts == {"gc threshold": redirect.STARTUP_GC_THRESHOLD, "spawned": True, "subprocess": "True []"}


@pytest.mark.parametrize(
    ("threshold", "expected"), [(redirect.STARTUP_GC_THRESHOLD, redirect._default_gc_threshold), (5, 5)]
)
def test_a_trainer_restores_the_gc_threshold(tmp_path: Path, threshold: int, expected: int) -> None:
    previous = gc.get_threshold()
    gc.set_threshold(threshold, *previous[1:])
    try:
        quiet_trainer(tmp_path)
        assert gc.get_threshold() == (expected, *previous[1:])
    finally:
        gc.set_threshold(*previous)


def test_a_shadowed_sitecustomize_runs(tmp_path: Path) -> None:
    startup = SOURCE_ROOT / "littrainer" / "redirection" / "startup"
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.from_the_other_one = __name__\n")
    path = f"{startup}:{tmp_path}:{SOURCE_ROOT}"
    done = run_python("-c", f"print(from_the_other_one); {PRINT_IS_REDIRECTED}", cwd=tmp_path, PYTHONPATH=path)
    assert done.stdout.split() == ["sitecustomize", "True"]
    assert done.stderr == ""
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('from the other one')\n")
    done = run_python("-c", PRINT_IS_REDIRECTED, cwd=tmp_path, PYTHONPATH=path)
    assert done.stdout.strip() == "True"
    assert "from the other one" in done.stderr


def test_an_interpreter_without_littrainer_starts_without_output(tmp_path: Path) -> None:
    # -S excludes site-packages, where littrainer may be installed.
    startup = SOURCE_ROOT / "littrainer" / "redirection" / "startup" / "sitecustomize.py"
    done = run_python("-I", "-S", "-c", f"exec(open({str(startup)!r}).read())\n{PRINT_IS_REDIRECTED}", cwd=tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False", "")


def test_the_environment_is_extended_once_and_keeps_its_path() -> None:
    environment = {"PYTHONPATH": "mine"}
    for _ in range(2):
        redirect.extend_to_children(environment)
        assert environment["PYTHONPATH"].split(":")[:2] == [redirect.STARTUP_FOLDER, "mine"]
        assert environment["PYTHONPATH"].count("startup") == 1
