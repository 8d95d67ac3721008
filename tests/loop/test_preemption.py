"""The report of Ctrl-C on the terminal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from littrainer.callbacks.state import TrainerState
from littrainer.distributed.environment import COMMAND
from littrainer.loop import preemption
from littrainer.runtime.interruptions import UpdateGuard, UserStopIteration
from tests.compat.processes import environment
from tests.scenarios.other_processes import MAX_WAIT_SECONDS, wait_until

TRAINING = """
import sys, time
from littrainer import HfArgumentParser, TrainerCallback, TrainingArguments
from tests.scenarios.trainers import quiet_trainer

class Waits(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            open(f"{args.output_dir}/waiting{args.process_index}", "w").close()
            time.sleep(600)

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
# Like the hook of a tracker.
hook = sys.excepthook
sys.excepthook = lambda *error: (open(f"told{args.process_index}", "w").close(), hook(*error))
settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "ddp_find_unused_parameters": False}
trainer = quiet_trainer(args.output_dir, trainer_kwargs={"callbacks": [Waits]}, **settings)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
"""
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of POSIX")
def test_ctrl_c_ends_all_processes_in_two_lines_and_with_status_130(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    command = ["run", "--devices", "2", "train.py", "--use_cpu", "--output_dir", "out"]
    paths = environment()["PYTHONPATH"] + f":{ROOT}"
    with subprocess.Popen(
        [sys.executable, "-m", "littrainer", *command],
        cwd=tmp_path,
        env=environment(PYTHONPATH=paths),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(lambda: len(list(tmp_path.glob("out/waiting*"))) == 2 or process.poll() is not None, "step 3")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=MAX_WAIT_SECONDS)
    assert len(list(tmp_path.glob("told*"))) == 2
    # A shell reports it as 130.
    assert process.returncode == -signal.SIGINT
    assert stderr.splitlines() == [
        "Interrupted at optimizer step 3 of 5. The last checkpoint is out/checkpoint-2.",
        f"To resume: littrainer {' '.join(command)} --resume_from_checkpoint out/checkpoint-2",
    ]


def test_without_a_checkpoint_the_command_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # From an earlier training.
    (tmp_path / "checkpoint-9").mkdir()
    monkeypatch.setenv(COMMAND, "littrainer run 'my train.py'")
    args: Any = SimpleNamespace(output_dir=str(tmp_path))
    assert preemption.describe_interruption(args, TrainerState(global_step=1, max_steps=5)) == [
        "Interrupted at optimizer step 1 of 5. No checkpoint has been saved.",
        "To start again: littrainer run 'my train.py'",
    ]


READS_IT = "(args,) = HfArgumentParser(TrainingArguments).parse(); train(args.resume_from_checkpoint)"
OPTION = "--resume_from_checkpoint"


@pytest.mark.parametrize(
    ("script", "variables", "command"),
    [
        (READS_IT, {}, f"python train.py --seed 1 {OPTION} c-2"),
        (READS_IT, {COMMAND: f"littrainer run train.py {OPTION} c-1"}, f"littrainer run train.py {OPTION} c-2"),
        (READS_IT, {"RANK": "0"}, f"start the same command with {OPTION} c-2"),
        ("trainer.train()", {}, "call trainer.train(resume_from_checkpoint='c-2')"),
    ],
    ids=["python", "littrainer run", "another launcher", "a script without the option"],
)
def test_the_resume_command_extends_the_command_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, variables: dict[str, str], command: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(tmp_path / "train.py")))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--seed", "1"])
    for name in (COMMAND, "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert preemption.resume_command("c-2") == command


def test_the_error_of_a_step_that_fails_under_ctrl_c_is_shown_before_the_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    args: Any = SimpleNamespace(output_dir=str(tmp_path), process_index=0)
    state = TrainerState(global_step=1, max_steps=5)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with (
            pytest.raises(KeyboardInterrupt) as caught,
            preemption.report_ctrl_c(args, lambda: state),
            UpdateGuard() as guard,
        ):
            guard.hold()
            signal.raise_signal(signal.SIGINT)
            raise RuntimeError("the device is lost")
        sys.excepthook(KeyboardInterrupt, caught.value, caught.tb)
    finally:
        signal.signal(signal.SIGINT, handler)
    trace, _, report = capsys.readouterr().err.partition("Interrupted at optimizer step 1 of 5.")
    assert "RuntimeError: the device is lost" in trace and "To start again" in report


@pytest.mark.parametrize(
    "error", [UserStopIteration(), KeyboardInterrupt(), ValueError()], ids=lambda error: type(error).__name__
)
def test_ctrl_c_that_waited_has_only_a_failure_for_its_cause(error: BaseException) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, UpdateGuard() as guard:
        guard.hold()
        signal.raise_signal(signal.SIGINT)
        raise error
    assert caught.value.__cause__ is (error if isinstance(error, ValueError) else None)
