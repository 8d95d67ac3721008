import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from littrainer.cli import main
from littrainer.commands import run
from littrainer.commands.run import _wait_for
from littrainer.distributed.launcher import Launch
from tests.compat.processes import environment, run_python
from tests.distributed.launchers import fake_gpus, set_only

REPORT = """
import json, os, pickle, sys

class Point:
    def __init__(self, x):
        self.x = x

def double(point):
    return Point(2 * point.x)

if __name__ == "__main__":
    import multiprocessing
    main = sys.modules["__main__"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (doubled,) = pool.map(double, [Point(21)])
    print(json.dumps({
        "argv": sys.argv,
        "path[0]": sys.path[0],
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "spec": __spec__ and __spec__.name,
        "is __main__": main.Point is Point,
        "pickled": pickle.loads(pickle.dumps(Point(3))).x,
        "spawned": [type(doubled) is Point, doubled.x],
        "redirected": type(sys.meta_path[0]).__name__ == "RedirectFinder",
    }))
"""


def littrainer(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "littrainer", *arguments, cwd=cwd)


def complaint_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command prints for `arguments` that it cannot run."""
    try:
        status = main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        status = end.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.startswith("littrainer run: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize("how", [["folder/report.py"], ["-m", "folder.report"]], ids=["script", "module"])
def test_a_program_sees_what_it_sees_under_plain_python_and_is_redirected(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "report.py").write_text(REPORT)
    arguments = [*how, "--lr", "1e-4", "-m", "--help", "--", "run"]
    ours = json.loads(littrainer("run", *arguments, cwd=tmp_path).stdout)
    plain = json.loads(run_python(*arguments, cwd=tmp_path).stdout)
    assert ours.pop("redirected") is True
    assert plain.pop("redirected") is False
    assert ours == plain
    assert ours["spawned"] == [True, 42]


def test_a_folder_with_a_main_module_and_a_name_with_a_dash_run_with_the_options_of_the_interpreter(
    tmp_path: Path,
) -> None:
    (tmp_path / "__main__.py").write_text("import sys\nprint('from the folder', sys.flags.optimize)\nsys.exit(7)")
    done = run_python("-O", "-m", "littrainer", "run", ".", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("from the folder 1\n", 7)
    (tmp_path / "-two words.py").write_text("import sys\nprint(sys.argv[1:])")
    assert littrainer("run", "--", "-two words.py", "--", "-m", cwd=tmp_path).stdout == "['--', '-m']\n"


def test_a_traceback_shows_the_script_alone(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("def f():\n    raise ValueError('as it was')\n\nf()\n")
    ours = littrainer("run", "fails.py", cwd=tmp_path)
    assert ours.returncode == 1
    assert "ValueError: as it was" in ours.stderr
    assert ours.stderr == run_python("fails.py", cwd=tmp_path).stderr


def test_where_a_process_cannot_be_replaced_the_script_runs_as_a_child_with_its_status() -> None:
    assert _wait_for([sys.executable, "-S", "-c", "raise SystemExit(7)"], dict(os.environ)) == 7


def test_isolated_interpreters_are_refused_since_they_would_train_without_littrainer(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    start = "import sys; sys.path.append(sys.argv.pop(1)); from littrainer.cli import main; sys.exit(main())"
    source_root = environment()["PYTHONPATH"]
    done = run_python("-E", "-c", start, source_root, "run", "script.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("littrainer run: python runs with -E")


SCRIPT = "{folder}/script.py"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{folder}/nothing_like_it"], "(looked in {folder})"),
        ([], "no program is named; give a SCRIPT, or -m MODULE"),
        (["--"], "no program is named"),
        (["-script.py"], "unrecognized arguments: -script.py"),
        (["-m"], "no program is named"),
        (["--no-such-option", SCRIPT], "unrecognized arguments: --no-such-option; "),
        (["--devces", "2", SCRIPT], "--devces: did you mean '--devices'?"),
        (["--devices", "0", SCRIPT], "--devices 0: give the number of processes on this node, 1 or more"),
        (["--devices", "two", SCRIPT], "--devices two: give the number of processes on this node, or `all`"),
        (["--devices", "2:", SCRIPT], "--devices 2:: give the number of processes on this node, or `all`, or MIN:MAX"),
        (["--devices", "5:8", "--restarts", "1", SCRIPT], "--devices 5:8: fewer processes have to divide 8"),
        (["--strategy", "horovod", SCRIPT], "invalid choice: 'horovod'"),
        (["--grace", "7", SCRIPT], "--grace is about processes that are started together; give --devices too"),
        (["--main-port", "4711", SCRIPT], "--main-port are about several machines; give --nodes too"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "script.py").touch()
    complaint = complaint_of(["run", *(word.format(folder=tmp_path) for word in arguments)], capsys)
    assert words.format(folder=tmp_path) in complaint


def test_a_script_is_read_from_standard_input_by_one_process_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "littrainer", "run", "-", "--lr"],
        input="import sys\nprint(sys.argv, type(sys.meta_path[0]).__name__)",
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.stdout, done.stderr) == ("['-', '--lr'] RedirectFinder\n", "")
    assert "cannot read one script from standard input" in complaint_of(["run", "--devices", "2", "-"], capsys)


SEVERAL = """
import json, os, sys

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_FSDP", "FSDP_VERSION")
facts = {name: os.environ.get(name) for name in names}
facts["argv"], facts["name"] = sys.argv, __name__
facts["redirected"] = type(sys.meta_path[0]).__name__ == "RedirectFinder"
with open(f"facts{os.environ['RANK']}.json", "w") as file:
    json.dump(facts, file)
"""


def test_a_module_is_run_in_several_processes_with_the_strategy_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "several.py").write_text(SEVERAL)
    own = ["--lr", "1e-4", "--devices", "$${local_rank}"]
    done = littrainer("run", "--devices=2", "--strategy", "fsdp", "-m", "several", *own, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for rank in range(2):
        assert json.loads((tmp_path / f"facts{rank}.json").read_text()) == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "argv": [str(tmp_path / "several.py"), *own],
            "name": "__main__",
            "redirected": True,
        }


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What is started instead of a script, in a machine that has a GPU's driver: devices, grace and the environment."""
    found: list[dict[str, Any]] = []

    def several(launch: Launch, command: list[str], restart: Any) -> int:
        found.append({"devices": launch.devices, "grace": launch.grace_seconds, **os.environ})
        return 0

    def one(command: list[str], environment: dict[str, str]) -> int:
        found.append({"devices": None, "grace": None, **environment})
        return 0

    set_only(monkeypatch)
    monkeypatch.setattr(run, "DRIVERS", (os.devnull,))
    monkeypatch.setattr(run, "run_processes", several)
    monkeypatch.setattr(os, "execve", lambda *_: None)
    monkeypatch.setattr(run, "_wait_for", one)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    before = dict(os.environ)
    yield found
    os.environ.clear()
    os.environ.update(before)


OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    ("words", "gpus", "variables", "devices"),
    [
        ("script.py", 1, {}, None),
        ("script.py --use_cpu", 4, {}, None),
        ("script.py", 4, OMPI, None),
        ("script.py", 4, {}, 4),
        ("--devices all --grace 7 script.py", 3, {}, 3),
        ("--strategy ddp script.py", 2, {}, 2),
        ("--devices 2 script.py --use_cpu", 1, {}, 2),
        ("--restarts 3 script.py", 1, {}, 1),
        ("--devices 2:8 --restarts 3 script.py", 4, {}, 4),
        # Another launcher watches; the script itself sees a hang.
        ("--hang-timeout 60 script.py", 4, OMPI, None),
    ],
)
def test_as_many_processes_are_started_as_are_asked_for_or_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[dict[str, Any]],
    words: str,
    gpus: int,
    variables: dict[str, str],
    devices: int | None,
) -> None:
    os.environ.update(variables)
    fake_gpus(monkeypatch, gpus)
    assert main(["run", *words.split()]) == 0
    (found,) = started
    assert (found["devices"], found["grace"]) == (devices, 7 if "--grace" in words else None)
    assert found.get("ACCELERATE_USE_FSDP") == ("false" if "--strategy" in words else None)
    assert found["LITTRAINER_COMMAND"] == f"littrainer run {words}"
    told = "littrainer: starting 4 processes, one for each GPU; --devices 1 starts one\n"
    assert capsys.readouterr().err == (told if devices == 4 and "--devices" not in words else "")


def test_more_devices_than_there_are_gpus_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, started: list[dict[str, Any]]
) -> None:
    fake_gpus(monkeypatch, 2)
    complaint = complaint_of(["run", "--devices", "3", "script.py"], capsys)
    assert "--devices 3, and this node has 2 GPUs: give at most 2. " in complaint
    assert "give the script --use_cpu, or set ACCELERATE_USE_CPU=true" in complaint
    # Processes are not started by two launchers.
    monkeypatch.setenv("RANK", "0")
    assert "was started by a launcher" in complaint_of(["run", "--devices", "2", "script.py"], capsys)
    assert started == []


def test_a_script_uses_the_cpu_if_its_arguments_say_so() -> None:
    for words in ("--use_cpu", "--use_cpu data.json", "--use_cpu=True", "--no_cuda"):
        assert run._has_cpu_option(["script.py", *words.split()])
    for words in ("--use_cpu False", "--use_cpu --use_cpu=false", "--m use_cpu"):
        assert not run._has_cpu_option(["script.py", *words.split()])
