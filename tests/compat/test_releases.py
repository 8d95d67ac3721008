"""The names of both tables, answered or left, with each release of transformers that the tables are written for."""

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
from littrainer.redirection.shim import bindings_in
from tests.compat.page import names_by_module
from tests.compat.processes import environment
from tests.compat.shapes import shape_of
from tests.scenarios.once_per_session import carried_out_once
from tests.scenarios.releases import ABSENT, earlier_release

# The releases of transformers that the tables of the page are about.
RELEASES = ("5.3.0", "5.23.0")
NEWEST = RELEASES[-1]
COLLECTOR = Path(__file__).with_name("release_facts.py")
ANSWERED, LEFT = (
    names_by_module(heading, RELEASES) for heading in ("module | littrainer's", "module | transformers' own")
)
NAMES: dict[str, list[str]] = {
    module: sorted({*ANSWERED.get(module, {}), *LEFT.get(module, {})}) for module in sorted({*ANSWERED, *LEFT})
}
OURS = {f"{module}.{name}": target for module, names in REPLACED.items() for name, target in names.items()}


def folder_of(release: str) -> Path:
    """What has to stand on the path for this release."""
    if release == NEWEST:
        assert transformers.__version__ == NEWEST
        return Path(transformers.__file__).parents[1]
    folder = earlier_release()
    if folder is None:
        pytest.skip(ABSENT)
    return folder


def public_names(module: str, release: str) -> set[str]:
    """Names that the source of a module binds and no other module lends it."""
    search, spec = [str(folder_of(release))], None
    fullname = ""
    for part in module.split("."):
        fullname = f"{fullname}.{part}".lstrip(".")
        spec = PathFinder.find_spec(fullname, search)
        assert spec is not None, f"{release} has no {module}"
        search = list(spec.submodule_search_locations or ())
    assert spec is not None and spec.origin is not None
    bindings = bindings_in(Path(spec.origin).read_text(encoding="utf-8"), module)
    return {name for name, binding in bindings.items() if binding.module is None and not name.startswith("_")}


@pytest.mark.parametrize("release", RELEASES)
def test_every_public_name_of_the_trainers_modules_is_answered_or_left_on_purpose(release: str) -> None:
    assert {module: set(names) for module, names in ANSWERED.items()} == {
        module: set(names) for module, names in REPLACED.items()
    }
    for module in NAMES:
        tables = (ANSWERED.get(module, {}), LEFT.get(module, {}))
        listed = {name for names in tables for name, releases in names.items() if release in releases}
        assert public_names(module, release) - {"logger"} == listed, module


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Release -> `plain` or `redirected` -> what such a process found; each runs once for all workers."""
    folders = {release: folder_of(release) for release in RELEASES}

    def run(shared: Path) -> None:
        for release, folder in folders.items():
            _run_sides(shared / release, folder)

    shared = carried_out_once(tmp_path_factory, "releases", run)
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
def test_under_the_redirection_each_name_comes_from_where_the_tables_say(facts: Any, release: str) -> None:
    plain, redirected = facts[release]["plain"], facts[release]["redirected"]
    assert plain["release"] == redirected["release"] == release
    homes = {name: fact["home"].partition(".")[0] for name, fact in redirected["names"].items()}
    assert plain["names"].keys() - homes.keys() == set()
    assert OURS.keys() - homes.keys() == set()
    assert [name for name in OURS if homes[name] == "transformers"] == []
    assert [name for name, home in homes.items() if home == "littrainer" and name not in OURS] == []


# Class -> members that transformers' has and ours has not, on purpose.
NOT_OFFERED: dict[str, set[str]] = {
    "transformers.integrations.integration_utils.TrackioCallback": {
        *("SPACE_URL", "BADGE_MARKDOWN", "MIN_TRACKIO_VERSION_FOR_FREEZE"),
    },
    "transformers.trainer_pt_utils.AcceleratorConfig": {"pop"},
    # A module that was imported in the body of the class.
    "transformers.training_args.TrainingArguments": {"is_torch_greater_or_equal_than_2_8"},
    "transformers.training_args_seq2seq.Seq2SeqTrainingArguments": {"is_torch_greater_or_equal_than_2_8"},
    # Ours is another name for adamw_torch_fused, as which this one is read.
    "transformers.training_args.OptimizerNames": {"ADAMW_APEX_FUSED"},
}


@pytest.mark.parametrize("release", RELEASES)
def test_what_answers_a_name_takes_what_the_name_takes_in_that_release(facts: Any, release: str) -> None:
    missed = {}
    for name, target in OURS.items():
        home, attribute = target.split(":")
        theirs = facts[release]["plain"]["names"].get(name)
        if theirs is not None:
            ours = shape_of(getattr(importlib.import_module(home), attribute))
            missed[name] = shortfalls(ours, theirs, NOT_OFFERED.get(name, set()))
    assert {name: found for name, found in missed.items() if found} == {}


def shortfalls(ours: dict[str, Any], theirs: dict[str, Any], excused: set[str]) -> list[str]:
    """What a caller of theirs would miss in ours."""
    if "choices" in theirs:
        wanted = {name: value for name, value in theirs["choices"].items() if name not in excused}
        return [f"choice {name}" for name, value in wanted.items() if ours["choices"].get(name) != value]
    if "constant" in theirs:
        return [] if ours.get("constant") == theirs["constant"] else ["another value"]
    found = missing_parameters(ours["parameters"], theirs["parameters"])
    for name, parameters in theirs.get("methods", {}).items():
        # Values that theirs has on the class and ours on each instance.
        if name in excused or (parameters is None and name in ours["parameters"]):
            continue
        if name not in ours["methods"]:
            found.append(f"no {name}")
        elif parameters is not None and ours["methods"][name] is not None:
            found += [f"{name}: {one}" for one in missing_parameters(ours["methods"][name], parameters)]
    return found


def missing_parameters(ours: list[str], theirs: list[str]) -> list[str]:
    """Parameters of theirs that ours does not take by name; one alone may have another name."""
    named = [name for name in theirs if not name.startswith("*")]
    if any(name.startswith("**") for name in ours) or (len(named) == 1 and ours):
        return []
    return [f"no parameter {name}" for name in named if name not in ours]


@pytest.mark.parametrize("release", RELEASES)
def test_a_training_is_bit_for_bit_that_of_the_releases_own_trainer(facts: Any, release: str) -> None:
    ours, theirs = facts[release]["redirected"]["training"], facts[release]["plain"]["training"]
    assert len(theirs["logs"]) > 8
    assert ours == theirs
