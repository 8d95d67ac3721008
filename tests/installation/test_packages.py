import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from littrainer.installation import packages
from littrainer.installation.packages import (
    PACKAGES,
    findings_about_copies,
    findings_about_ranges,
    installed_copies,
    own_place,
    versions,
)

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts the metadata, and a module, of a package into a folder that comes first on the import path."""
    monkeypatch.chdir(tmp_path)

    def put(
        name: str, version: str, place: str = "site", module: str | None = None, requires: tuple[str, ...] = ()
    ) -> Path:
        folder = tmp_path / place
        about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir(parents=True)
        lines = [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
            *(f"Requires-Dist: {one}" for one in requires),
        ]
        (about / "METADATA").write_text("\n".join(lines) + "\n")
        if module is not None:
            (folder / module).mkdir()
            (folder / module / "__init__.py").touch()
        if str(folder) not in sys.path:
            monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        return folder

    return put


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the made-up package alone."""
    monkeypatch.setattr(packages, "PACKAGES", {"made up": {"made-up": "made_up"}})
    monkeypatch.setattr(packages, "OWN_NAME", "made-up-trainer")


def test_versions_are_those_of_the_metadata_in_groups() -> None:
    found = versions()
    assert found["training"]["torch"] == importlib.metadata.version("torch")
    assert {"transformers", "datasets"} <= found["Hugging Face"].keys()
    assert all(set(names) <= set(PACKAGES[group]) for group, names in found.items())


def test_a_version_outside_the_range_is_named_with_what_to_install(install: Install, alone: None) -> None:
    requires = ("made-up>=2,!=2.5", "absent-package>=1", 'made-up<2; extra == "old"', 'made-up==9; extra == "test"')
    install("made-up-trainer", "1.0", requires=requires)
    install("made-up", "1.5", place="other", module="made_up")
    found = list(findings_about_ranges())
    assert found == [
        "made-up 1.5 is outside what littrainer supports: pip install 'made-up!=2.5,>=2'",
        "absent-package is not installed, and littrainer needs it: pip install 'absent-package>=1'",
    ]


def test_a_range_of_an_extra_counts_where_its_package_is_installed(install: Install, alone: None) -> None:
    install("made-up-trainer", "1.0", requires=('made-up>=2; extra == "tune"', 'absent-package>=1; extra == "tune"'))
    install("made-up", "1.5", place="other", module="made_up")
    assert list(findings_about_ranges()) == [
        "made-up 1.5 is outside what littrainer[tune] supports: pip install 'made-up>=2'"
    ]


def test_what_is_installed_here_is_within_the_ranges() -> None:
    assert [finding for finding in findings_about_ranges() if "is outside" in finding] == []


def test_a_package_that_is_installed_twice_is_named_with_both_places(install: Install, alone: None) -> None:
    second = install("made-up", "1.0", place="second", module="made_up")
    first = install("made-up", "2.0", place="first", module="made_up")
    assert [copy.version for copy in installed_copies("made-up")] == ["2.0", "1.0"]
    (found,) = findings_about_copies()
    assert found.startswith(f"made-up is installed 2 times (2.0 in {first} and 1.0 in {second}); the first counts")


def test_a_module_that_hides_an_installed_package_is_named(
    install: Install, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install("made-up", "1.0", module="made_up")
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "made_up.py").touch()
    monkeypatch.syspath_prepend(str(hiding))
    (found,) = findings_about_copies()
    assert found.startswith(f"module made_up comes from {hiding}, and not from the installed made-up 1.0 in {folder}")


def test_a_module_in_the_working_directory_is_named_and_a_folder_without_init_is_not(
    install: Install, alone: None, tmp_path: Path
) -> None:
    install("made-up", "1.0", module="made_up")
    (tmp_path / "made_up").mkdir()
    assert list(findings_about_copies()) == []
    (tmp_path / "made_up" / "__init__.py").touch()
    (found,) = findings_about_copies()
    assert found.startswith(f"the working directory has a module made_up of its own ({tmp_path})")


def test_metadata_without_its_module_is_named(install: Install, alone: None) -> None:
    install("made-up", "1.0")
    (found,) = findings_about_copies()
    assert "module made_up is not found: pip install --force-reinstall --no-deps made-up==1.0" in found


def test_a_link_to_a_source_tree_is_told_from_a_copy(install: Install, alone: None, tmp_path: Path) -> None:
    source = tmp_path / "source tree"
    (source / "made_up").mkdir(parents=True)
    (source / "made_up" / "__init__.py").touch()
    site = install("made-up", "1.0")
    note = {"url": source.as_uri(), "dir_info": {"editable": True}}
    (site / "made_up-1.0.dist-info" / "direct_url.json").write_text(json.dumps(note))
    sys.path.insert(0, str(source))
    try:
        (copy,) = installed_copies("made-up")
        assert (copy.folder, copy.is_editable) == (source, True)
        assert list(findings_about_copies()) == []
    finally:
        sys.path.remove(str(source))


def test_the_place_of_littrainer_is_that_of_its_code() -> None:
    import littrainer

    place = own_place()
    assert (place["version"], place["folder"]) == (littrainer.__version__, str(Path(littrainer.__file__).parent))
