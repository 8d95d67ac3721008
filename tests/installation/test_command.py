import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from littrainer.cli import main
from littrainer.installation import command, devices
from littrainer.installation.machine import machine
from tests.compat.processes import facts_of, run_python

# In the place of torch: what happens when it is imported.
BROKEN_TORCHES = {
    "raise ImportError('no libcudart.so.12')": "import torch fails with ImportError: no libcudart.so.12",
    "import os; os.abort()": "import torch ended its process with signal 6",
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the command prints as JSON in a process of its own, and which libraries that process has loaded."""
    script = (
        "import contextlib, io, json, sys\nfrom littrainer.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as printed:\n    status = main(['env', '--json'])\n"
        "loaded = sorted({'torch', 'lightning', 'transformers', 'datasets', 'numpy'} & set(sys.modules))\n"
        "print(json.dumps([status, loaded, json.loads(printed.getvalue())]))\n"
    )
    return facts_of(script, tmp_path_factory.mktemp("env"), HF_TOKEN="hf_secret_of_mine", RANK="0")


def test_facts_come_as_json_with_status_0(facts: Any) -> None:
    status, _, told = facts
    assert status == 0
    assert list(told) == ["littrainer", "findings", "machine", "torch", "packages", "environment variables"]
    version = importlib.metadata.version("torch")
    assert told["torch"]["build"].startswith(version)
    assert "gloo" in told["torch"]["distributed back ends"]
    assert told["packages"]["training"]["torch"] == version
    assert told["machine"]["Python"].startswith("CPython 3.")
    assert told["machine"]["memory"].endswith("GiB") or "limited to" in told["machine"]["memory"]


def test_no_library_is_loaded_into_the_commands_own_process(facts: Any) -> None:
    assert facts[1] == []


def test_variables_are_told_without_secrets(facts: Any) -> None:
    told = facts[2]["environment variables"]
    assert told["RANK"] == "0" and told["HF_TOKEN"] == "(hidden)"
    assert "hf_secret" not in json.dumps(facts)


@pytest.mark.parametrize("statement", BROKEN_TORCHES)
@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_a_broken_torch_is_a_finding_and_all_else_is_told(tmp_path: Path, statement: str) -> None:
    (tmp_path / "torch.py").write_text(statement)
    # `python -m` puts the working directory first on the import path.
    done = run_python("-m", "littrainer", "env", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert BROKEN_TORCHES[statement] in done.stdout.partition("### Findings")[2].partition("### Machine")[0]
    assert "- training: torch " in done.stdout and "- operating system: " in done.stdout


def test_a_machine_without_torch_gets_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    program = devices.PROGRAM.replace("from littrainer", "sys.modules['torch'] = None\nfrom littrainer")
    monkeypatch.setattr(devices, "PROGRAM", program)
    found = devices.read(devices.start())
    assert found == {
        "error": "import torch fails with ModuleNotFoundError: import of torch halted; None in sys.modules"
    }


def test_devices_that_do_not_answer_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "SECONDS", 0.1)
    waiting = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(300)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "took more than 0.1 seconds" in devices.read(waiting)["error"]
    assert waiting.returncode is not None


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what takes long."""
    monkeypatch.setattr(devices, "start", lambda: None)
    monkeypatch.setattr(devices, "read", lambda asked: {"build": "none", "devices": ["one", "two"]})


@pytest.mark.usefixtures("no_torch")
def test_what_cannot_be_found_out_is_told_in_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def versions() -> dict[str, Any]:
        raise OSError("disk is gone")

    def findings_about_ranges() -> Iterator[str]:
        yield "first finding"
        raise ModuleNotFoundError("No module named 'packaging'")

    monkeypatch.setattr(command, "versions", versions)
    monkeypatch.setattr(command, "findings_about_ranges", findings_about_ranges)
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert "- versions cannot be found out (OSError: disk is gone)" in printed
    assert "- first finding\n- findings about ranges cannot be found out (ModuleNotFoundError: No module" in printed
    assert "- devices: one; two" in printed


@pytest.mark.usefixtures("no_torch")
def test_the_text_is_markdown_with_a_heading_for_each_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", os.path.expanduser("~/hf"))
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    headings = [line for line in printed.splitlines() if line.startswith("### ")]
    assert headings[0].startswith("### littrainer ")
    assert headings[1:] == ["### Findings", "### Machine", "### torch", "### Packages", "### Environment variables"]
    assert "- `HF_HOME=~/hf`" in printed


@pytest.mark.usefixtures("no_torch")
def test_a_value_of_several_lines_stays_within_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "a`b\n### c\x1b[31m")
    monkeypatch.setattr(devices, "read", lambda asked: {"error": "first\n  second"})
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "`` TORCH_LOGS=a`b\\n### c\\x1b[31m ``" in [line[2:] for line in lines]
    assert "- first second" in lines and "- error: first second" in lines


def gpu(number: int) -> Any:
    return SimpleNamespace(name=f"Accelerator {number}", total_memory=80 << 30, major=9, minor=0)


def test_each_gpu_is_named_with_its_memory_and_its_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_properties=gpu)
    mps = SimpleNamespace(is_available=lambda: False)
    stand_in: Any = ModuleType("torch")
    stand_in.cuda, stand_in.xpu, stand_in.backends = kind, None, SimpleNamespace(mps=mps)
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    devices.answer()
    told = json.loads(capsys.readouterr().out)
    assert told["devices"] == [
        f"cuda:{number} Accelerator {number}, 80.0 GiB, compute capability 9.0" for number in (0, 1)
    ]
    assert told["threads"].startswith("cannot be found out (AttributeError")


def test_a_fact_about_the_machine_that_fails_keeps_no_other_from_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("littrainer.installation.machine.os.cpu_count", lambda: 1 / 0)
    found = machine()
    assert found["processors"] == "cannot be found out (ZeroDivisionError: division by zero)"
    assert found["memory"] and found["Python"]
