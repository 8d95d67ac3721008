"""The wheel and the sdist hold what they should, and an environment that has the wheel alone trains with it."""

from __future__ import annotations

import email
import email.message
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from littrainer import __version__
from tests.scenarios.once_per_session import run_once

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "littrainer"
NAME = f"littrainer-{__version__}"

TRAINING = """
import torch
from transformers import Trainer, TrainingArguments

import littrainer


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        predicted = self.layer(x).squeeze(-1)
        return {"loss": (predicted - labels).square().mean(), "logits": predicted}


torch.manual_seed(0)
rows = [{"x": torch.tensor([i / 8, 1.0]), "labels": i / 4} for i in range(16)]
args = TrainingArguments("out", max_steps=8, logging_steps=1, learning_rate=0.1, report_to="none", use_cpu=True)
trainer = Trainer(Line(), args, train_dataset=rows)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(littrainer.__file__, type(trainer).__module__, losses[-1] < losses[0], sep="|")
"""

TYPED_PROGRAM = """
from littrainer import TrainingArguments
reveal_type(TrainingArguments("out").learning_rate)
TrainingArguments("out").learning_rat
"""


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, as `python -m build` makes them: the sdist of this tree, and the wheel of that sdist."""
    return run_once(tmp_path_factory, "distributions", lambda folder: build(folder))


def build(outdir: Path, *options: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(outdir), *options, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def files_in_wheel(folder: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(folder / f"{NAME}-py3-none-any.whl") as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def metadata_of(folder: Path) -> email.message.Message:
    return email.message_from_bytes(files_in_wheel(folder)[f"{NAME}.dist-info/METADATA"])


def test_the_wheel_holds_each_file_of_the_package_its_licence_and_nothing_else(dist: Path) -> None:
    written = {
        f"littrainer/{path.relative_to(SOURCE).as_posix()}": path.read_bytes()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    results = files_in_wheel(dist)
    assert {"littrainer/py.typed", "littrainer/redirection/startup/sitecustomize.py"} < written.keys()
    assert {name: text for name, text in results.items() if name.startswith("littrainer/")} == written
    described = {name for name in results if name not in written}
    assert described == {
        f"{NAME}.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert results[f"{NAME}.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    commands = ConfigParser()
    commands.read_string(results[f"{NAME}.dist-info/entry_points.txt"].decode())
    assert dict(commands["console_scripts"]) == {"littrainer": "littrainer.cli:main"}


def test_the_sdist_and_the_tree_build_equal_wheels(dist: Path, tmp_path: Path) -> None:
    build(tmp_path, "--wheel")
    assert files_in_wheel(dist) == files_in_wheel(tmp_path)


def test_the_sdist_holds_what_a_contributor_needs_and_no_caches(dist: Path) -> None:
    with tarfile.open(dist / f"{NAME}.tar.gz") as sdist:
        names = {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
    folders = ("benchmarks", "docs", "examples", "src", "tests")
    sources = {path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    extras = {".ci/run", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt"}
    assert {*sources, *pages, *extras, "mkdocs.yml", "pyproject.toml"} - names == set()
    assert [name for name in names if re.search(r"__pycache__|\.pyc$|_cache/|^(runs|dist|site|\.venv)/", name)] == []


def test_the_described_package_has_a_licence_its_versions_and_a_readme_without_links_into_the_repository(
    dist: Path,
) -> None:
    metadata = metadata_of(dist)
    readme = metadata.get_payload()
    assert isinstance(readme, str)
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.10")
    assert metadata["Description-Content-Type"] == "text/markdown"
    written = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("# littrainer") and len(readme) > len(written) / 2
    assert "](docs/" in written
    assert re.findall(r"\]\((?!https?:)[^)]*\)|make demo|<!--|<picture", readme) == []


@pytest.fixture(scope="session")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it and nothing else."""

    def install(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=600)
        (wheel,) = dist.glob("*.whl")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
        subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], check=True, timeout=600)

    return run_once(tmp_path_factory, "environment_with_the_wheel", install)


def test_type_checkers_see_the_types_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TYPED_PROGRAM)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", installed / "bin" / "python", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    messages = checked.stdout.splitlines()
    assert 'program.py:3: note: Revealed type is "float"' in [line.replace("builtins.", "") for line in messages]
    assert any(line.startswith("program.py:4: error") and "learning_rat" in line for line in messages), checked


def test_an_environment_with_the_wheel_prints_its_version_and_trains(installed: Path, tmp_path: Path) -> None:
    # The wheel's dependencies are visible, but not the checkout, which only a .pth file there names.
    (there,) = installed.glob("lib/python*/site-packages")
    (there / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (tmp_path / "train.py").write_text(TRAINING)

    def littrainer(*arguments: str) -> str:
        done = subprocess.run(
            [installed / "bin" / "littrainer", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert __version__ in littrainer("--version")
    assert __version__ in littrainer("env")
    imported, trainer, is_learning = littrainer("run", "train.py").splitlines()[-1].split("|")
    assert Path(imported) == there / "littrainer" / "__init__.py"
    assert (trainer, is_learning) == ("littrainer.trainer", "True")
