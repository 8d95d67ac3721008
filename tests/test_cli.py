import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from littrainer import __version__
from littrainer.cli import COMMANDS, main
from littrainer.commands import command_line

from .compat.processes import environment

SCRIPT = "{folder}/train.py"
# Prints more than a pipe holds, so that it is still printing when its reader has gone.
TALKS = """
import sys
from littrainer import cli
from littrainer.commands.command_line import run_quietly

def talk():
    for _ in range(100_000):
        print("a line that nobody reads")
    return 0

sys.exit(run_quietly(talk))
"""


def ended(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, str]:
    """Exit status of a command in this process, and what it printed."""
    try:
        status: Any = main(arguments)
    except SystemExit as end:
        status = end.code
    return (status, *capsys.readouterr())


def test_version_and_help_are_printed_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--version"], capsys) == (0, f"littrainer {__version__}\n", "")
    status, page, complaint = ended(["--help"], capsys)
    assert (status, complaint) == (0, "")
    for name, purpose in COMMANDS.items():
        assert f" {name} " in page or f" {name}\n" in page
        assert purpose in " ".join(page.split())
    # As argparse answers a command that is missing.
    assert ended([], capsys) == (2, "", page)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_page_of_the_same_kind(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, page, complaint = ended([name, "--help"], capsys)
    assert (status, complaint) == (0, "")
    assert page.startswith(f"usage: littrainer {name} [") and "-h, --help" in page


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["explian"], "no command 'explian'; did you mean 'explain'?"),
        (["xyz"], "no command 'xyz'; known are run, check, explain, report, list, verify, compare, env"),
        (["script.py", "--lr", "1"], "to run a script, put `run` before it: littrainer run script.py"),
        (["--verson"], "unrecognized arguments: --verson; --verson: did you mean '--version'?"),
        (["report", "--outptu=x", "runs"], "unrecognized arguments: --outptu=x; --outptu: did you mean '--output'?"),
        (["explain", "--as-cod"], "unrecognized arguments: --as-cod; --as-cod: did you mean '--as-code'?"),
        (["env", "more"], "unrecognized arguments: more; see --help"),
        (["explain", "stray", "--seed", "1"], "no script 'stray'"),
        (["explain", "--learning_ratt", "1"], "did you mean '--learning_rate'"),
        (["explain", "--learning_rate", "fast"], "invalid float value: 'fast'"),
        (["explain", "--fp16", "--bf16"], "fp16 and bf16 are both set"),
        (["verify"], "no program is named"),
        (["verify", "--steps", "0", SCRIPT], "at least one of --steps"),
        (["verify", "{folder}/nothing.py"], "no script '{folder}/nothing.py'"),
        (["verify", "--stesp", "3", SCRIPT], "--stesp: did you mean '--steps'?"),
        (["check", "nowhere.py"], "no script 'nowhere.py'"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    (tmp_path / "train.py").touch()
    status, printed, told = ended([word.format(folder=tmp_path) for word in arguments], capsys)
    assert (status, printed) == (2, "")
    command = f" {arguments[0]}" if arguments[0] in COMMANDS else ""
    assert told.startswith(f"littrainer{command}: ") and told.count("\n") == 1
    assert complaint.format(folder=tmp_path) in told


@pytest.mark.skipif(os.name != "posix", reason="pipes are those of POSIX")
def test_a_reader_that_leaves_ends_a_command_without_a_word() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TALKS], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"a line that nobody reads" + os.linesep.encode()
        process.stdout.close()
        assert process.stderr is not None and process.stderr.read() == b""
    assert process.returncode == command_line.PIPE_CLOSED == 141


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_ctrl_c_ends_a_command_by_the_signal_and_without_a_traceback() -> None:
    program = "import sys; from littrainer.commands.command_line import run_quietly\n"
    program += "def wait():\n    raise KeyboardInterrupt\nsys.exit(run_quietly(wait))"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, check=False)
    # A shell reports it as 130.
    assert (done.returncode, done.stderr) == (-2, b"")
    assert command_line.INTERRUPTED == 130


def test_letters_that_the_output_cannot_hold_are_written_as_escapes() -> None:
    setting = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    program = "from littrainer.commands.command_line import run_quietly; run_quietly(lambda: print('l\\xe4ufe') or 0)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**environment(), **setting}, capture_output=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, rb"l\xe4ufe", b"")
