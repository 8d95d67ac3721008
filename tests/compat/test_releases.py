"""Names of transformers' modules under the redirection, with each supported release."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import transformers

from littrainer.redirection.names import REPLACED
from littrainer.redirection.shim import parse_bindings
from tests.compat.page import names_by_module
from tests.compat.processes import environment
from tests.compat.shapes import shape_of
from tests.scenarios.once_per_session import run_once
from tests.scenarios.releases import ABSENT, earlier_release

RELEASES = ("5.3.0", "5.23.0")
NEWEST = RELEASES[-1]
COLLECTOR = Path(__file__).with_name("release_facts.py")
OURS_BY_MODULE, ORIGINAL = (
    names_by_module(heading, RELEASES) for heading in ("module | littrainer's", "module | transformers' own")
)
NAMES: dict[str, list[str]] = {
    module: sorted({*OURS_BY_MODULE.get(module, {}), *ORIGINAL.get(module, {})})
    for module in sorted({*OURS_BY_MODULE, *ORIGINAL})
}
OURS = {f"{module}.{name}": target for module, names in REPLACED.items() for name, target in names.items()}


def find_release(release: str) -> Path:
    """Return the path entry of a release."""
    if release == NEWEST:
        assert transformers.__version__ == NEWEST
        return Path(transformers.__file__).parents[1]
    folder = earlier_release()
    if folder is None:
        pytest.skip(ABSENT)
    return folder


def list_public_names(module: str, release: str) -> set[str]:
    """Return the public names that a module's source defines."""
    search, spec = [str(find_release(release))], None
    fullname = ""
    for part in module.split("."):
        fullname = f"{fullname}.{part}".lstrip(".")
        spec = PathFinder.find_spec(fullname, search)
        assert spec is not None, f"{release} has no {module}"
        search = list(spec.submodule_search_locations or ())
    assert spec is not None and spec.origin is not None
    bindings = parse_bindings(Path(spec.origin).read_text(encoding="utf-8"), module)
    return {name for name, binding in bindings.items() if binding.module is None and not name.startswith("_")}


@pytest.mark.parametrize("release", RELEASES)
def test_every_public_name_is_in_a_table(release: str) -> None:
    assert {module: set(names) for module, names in OURS_BY_MODULE.items()} == {
        module: set(names) for module, names in REPLACED.items()
    }
    for module in NAMES:
        tables = (OURS_BY_MODULE.get(module, {}), ORIGINAL.get(module, {}))
        listed = {name for names in tables for name, releases in names.items() if release in releases}
        assert list_public_names(module, release) - {"logger"} == listed, module


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return release -> `plain` or `redirected` -> facts of such a process, which runs once per session."""
    folders = {release: find_release(release) for release in RELEASES}

    def run(shared: Path) -> None:
        for release, folder in folders.items():
            _run_sides(shared / release, folder)

    shared = run_once(tmp_path_factory, "releases", run)
    return {
        release: {side.stem: json.loads(side.read_text()) for side in (shared / release).glob("*.json")}
        for release in RELEASES
    }


def _run_sides(run: Path, release: Path) -> None:
    processes = {}
    for side in ("plain", "redirected"):
        cwd = run / side
        cwd.mkdir(parents=True)
        (cwd / "names.json").write_text(json.dumps(NAMES))
        path = os.pathsep.join([str(release), environment()["PYTHONPATH"]])
        command = [sys.executable, str(COLLECTOR), side, "names.json"]
        processes[side] = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(PYTHONPATH=path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for side, process in processes.items():
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        (run / f"{side}.json").write_text(output.splitlines()[-1])


@pytest.mark.parametrize("release", RELEASES)
def test_each_name_is_imported_from_the_library_in_the_tables(facts: Any, release: str) -> None:
    plain, redirected = facts[release]["plain"], facts[release]["redirected"]
    assert plain["release"] == redirected["release"] == release
    homes = {name: fact["home"].partition(".")[0] for name, fact in redirected["names"].items()}
    assert plain["names"].keys() - homes.keys() == set()
    assert OURS.keys() - homes.keys() == set()
    assert [name for name in OURS if homes[name] == "transformers"] == []
    assert [name for name, home in homes.items() if home == "littrainer" and name not in OURS] == []


# Class -> members of transformers that ours lacks on purpose.
NOT_OFFERED: dict[str, set[str]] = {
    "transformers.integrations.integration_utils.TrackioCallback": {
        *("SPACE_URL", "BADGE_MARKDOWN", "MIN_TRACKIO_VERSION_FOR_FREEZE"),
    },
    "transformers.trainer_pt_utils.AcceleratorConfig": {"pop"},
    # Import in the class body.
    "transformers.training_args.TrainingArguments": {"is_torch_greater_or_equal_than_2_8"},
    "transformers.training_args_seq2seq.Seq2SeqTrainingArguments": {"is_torch_greater_or_equal_than_2_8"},
    # Alias of adamw_torch_fused.
    "transformers.training_args.OptimizerNames": {"ADAMW_APEX_FUSED"},
}


@pytest.mark.parametrize("release", RELEASES)
def test_a_replaced_name_has_the_interface_of_that_release(facts: Any, release: str) -> None:
    differences = {}
    for name, target in OURS.items():
        home, attribute = target.split(":")
        theirs = facts[release]["plain"]["names"].get(name)
        if theirs is not None:
            ours = shape_of(getattr(importlib.import_module(home), attribute))
            differences[name] = find_differences(ours, theirs, NOT_OFFERED.get(name, set()))
    assert {name: missing for name, missing in differences.items() if missing} == {}


def find_differences(ours: dict[str, Any], theirs: dict[str, Any], exceptions: set[str]) -> list[str]:
    """Return the parts of their interface that ours lacks."""
    if "choices" in theirs:
        expected = {name: value for name, value in theirs["choices"].items() if name not in exceptions}
        return [f"choice {name}" for name, value in expected.items() if ours["choices"].get(name) != value]
    if "constant" in theirs:
        return [] if ours.get("constant") == theirs["constant"] else ["another value"]
    differences = find_missing_parameters(ours["parameters"], theirs["parameters"])
    for name, parameters in theirs.get("methods", {}).items():
        # Class attributes there, instance attributes here.
        if name in exceptions or (parameters is None and name in ours["parameters"]):
            continue
        if name not in ours["methods"]:
            differences.append(f"no {name}")
        elif parameters is not None and ours["methods"][name] is not None:
            missing = find_missing_parameters(ours["methods"][name], parameters)
            differences += [f"{name}: {parameter}" for parameter in missing]
    return differences


def find_missing_parameters(ours: list[str], theirs: list[str]) -> list[str]:
    """Return the parameters that ours lacks; a single parameter may have a different name."""
    named = [name for name in theirs if not name.startswith("*")]
    if any(name.startswith("**") for name in ours) or (len(named) == 1 and ours):
        return []
    return [f"no parameter {name}" for name in named if name not in ours]


@pytest.mark.parametrize("release", RELEASES)
def test_a_training_equals_that_of_the_release_bit_for_bit(facts: Any, release: str) -> None:
    ours, theirs = facts[release]["redirected"]["training"], facts[release]["plain"]["training"]
    assert len(theirs["logs"]) > 8
    assert ours == theirs
