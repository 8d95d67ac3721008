"""The command `littrainer verify`: are the numbers those of transformers' own Trainer?"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from littrainer.arguments.shown_arguments import away_from_defaults, default_texts
from littrainer.callbacks.log_history import logged_values
from littrainer.checkpoint.layout import TRAINER_STATE_NAME
from littrainer.commands import recorded_training
from littrainer.commands.command_line import CommandParser, complain
from littrainer.commands.compare import causes
from littrainer.commands.differences import (
    NOT_LOGGED,
    LogComparison,
    compare_logs,
    first_difference,
    largest_gaps,
    weight_gaps,
    weights_in,
)
from littrainer.commands.env import version_of
from littrainer.commands.recorded_training import LITTRAINER, TRANSFORMERS
from littrainer.commands.report_folders import NothingToReport, Run, read_folders
from littrainer.distributed.environment import is_launched
from littrainer.redirection.redirect import STARTUP_FOLDER, extend_to_children

DESCRIPTION = """\
Run the first steps of a script's first training, an evaluation and a save twice: with transformers' own Trainer and
with littrainer's, each in a separate process. Compare what they log at each step, the metrics and the weights. The
script writes into temporary folders instead of its output_dir; trackers and the Hub are left out. Exit status: 0 if all
is equal, 1 if something differs, 2 if the script does not run with one of them.
"""
# Stands among the names of logged values for the numbers of the model.
WEIGHTS = "weights"
# What is shown of a script that fails.
LAST_LINES = 15
# By so many times what a Trainer differs from itself in two runs two Trainers may differ. What is more than a share of
# the loss is no rounding.
TIMES_THE_NOISE, LARGEST_NOISE = 4, 0.01
# The release whose numbers littrainer has.
COMPARED_WITH = "5.23.0"
# Argument that differs from its default -> the topic in docs/known-differences.md that may be about it.
KNOWN_DIFFERENCES = {
    **dict.fromkeys(("label_smoothing_factor", "optim_args"), "loss-and-optimizer"),
    "sortish_sampler": "data",
    "dataloader_persistent_workers": "evaluation",
    "fsdp": "several-processes-and-devices",
}


def build_parser() -> CommandParser:
    """Return the parser of the command's options and of the program's name."""
    usage = "littrainer verify [-h] [--steps N] {SCRIPT | -m MODULE} [ARGS ...]"
    parser = CommandParser("littrainer verify", description=DESCRIPTION, usage=usage)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", metavar="N", type=int, default=20, help="optimizer steps to compare (default: 20)")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="module instead of a script"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT", help="script to run, with its arguments")
    return parser


class CannotVerifyError(Exception):
    """A script cannot be verified; the message says why."""


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer verify`; returns the exit status."""
    options = build_parser().parse_args(words)
    program = ["-m", *options.module] if options.module else options.program
    try:
        if not program or options.steps < 1:
            raise CannotVerifyError("name a SCRIPT, or -m MODULE, after the options, and give at least one of --steps")
        if program[0] != "-m" and not os.path.isfile(program[0]):
            raise CannotVerifyError(
                f"no script {program[0]!r} (looked in {os.path.abspath(os.path.dirname(program[0]))})"
            )
        if is_launched():
            raise CannotVerifyError("it compares trainings in one process; start it without a launcher")
        if version_of("transformers") is None or version_of("accelerate") is None:
            raise CannotVerifyError(
                "transformers' own Trainer is not complete here: pip install transformers accelerate"
            )
        with tempfile.TemporaryDirectory(prefix="littrainer-verify-") as folder:
            return _verify(program, options.steps, Path(folder))
    except (CannotVerifyError, NothingToReport, ValueError) as error:
        return complain("verify", str(error))


def _verify(program: list[str], steps: int, folder: Path) -> int:
    theirs, ours = (_recorded(program, steps, folder / side, side) for side in (TRANSFORMERS, LITTRAINER))
    logs, weights = _compare(theirs, ours, {})
    told, noise, repeats = "equal, bit for bit", {}, True
    if logs.step is not None or weights:
        # By what each side differs from itself in a second run, the two may differ too.
        twins = (_recorded(program, steps, folder / f"{side} again", side) for side in (TRANSFORMERS, LITTRAINER))
        noise = _noise([(theirs, next(twins)), (ours, next(twins))])
        losses = [abs(values.get("loss", 0.0)) for values in logged_values(theirs.state.log_history).values()]
        repeats = noise.get("loss", 0.0) <= LARGEST_NOISE * max(losses, default=0.0)
        told = "equal but for rounding"
    shown = ", ".join(f"{name} by up to {gap:.3g}" for name, gap in noise.items())
    if noise and repeats:
        logs, weights = _compare(theirs, ours, {name: TIMES_THE_NOISE * gap for name, gap in noise.items()})
    if logs.step is None and not weights:
        held = weights_in(ours.folder).values()
        print(
            f"{told}: {logs.equal} logged values of {ours.state.global_step} steps, and "
            f"{sum(tensor.numel() for tensor in held):,} weights ({ours.environment['device']})"
        )
        if noise:
            print(f"Two runs with the same Trainer differ as much: {shown}.")
        return 0
    print(_difference(logs, weights))
    print("Usual causes:")
    if not repeats:
        print(
            "- numbers that the script does not repeat, since they come from the clock or the system: two runs with the"
        )
        print(f"  same Trainer differ, {shown}")
    for cause in _causes(theirs, ours, logs):
        print(f"- {cause}")
    return 1


def _compare(theirs: Run, ours: Run, tolerances: Mapping[str, float]) -> tuple[LogComparison, str | None]:
    """Return how far the logs are equal, and the first weight that differs, in words."""
    logs = compare_logs(
        logged_values(theirs.state.log_history), logged_values(ours.state.log_history), tolerances=tolerances
    )
    expected, actual = dict(weights_in(theirs.folder)), dict(weights_in(ours.folder))
    names = expected.keys() ^ actual.keys()
    found = (first_difference(expected[name], actual[name], tolerances.get(WEIGHTS, 0.0), name) for name in expected)
    return logs, f"one side alone has {sorted(names)}" if names else next(filter(None, found), None)


def _noise(twins: Sequence[tuple[Run, Run]]) -> dict[str, float]:
    """Return by how much runs with the same Trainer differ at most: name of a logged value, or `WEIGHTS` -> number."""
    noise: dict[str, float] = {}
    for pair in twins:
        one, other = (logged_values(run.state.log_history) for run in pair)
        weights = max(weight_gaps(*(weights_in(run.folder) for run in pair)).values(), default=0.0)
        for name, gap in {**largest_gaps(one, other), WEIGHTS: weights}.items():
            noise[name] = max(noise.get(name, 0.0), gap)
    return {name: gap for name, gap in noise.items() if gap}


def _recorded(program: list[str], steps: int, folder: Path, side: str) -> Run:
    """Run the script with one side's Trainer, in a new process.

    Raises:
        CannotVerifyError: it fails, or does not train.
    """
    folder.mkdir()
    environment = {**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"), "WANDB_MODE": "disabled"}
    # Transformers would put several GPUs into one process, with larger batches.
    environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    extend_to_children(environment)
    if side == TRANSFORMERS:
        paths = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != STARTUP_FOLDER)
    called = "transformers' own Trainer" if side == TRANSFORMERS else "littrainer's Trainer"
    print(f"littrainer verify: {steps} steps with {called}", file=sys.stderr, flush=True)
    command = [sys.executable, recorded_training.__file__, side, str(steps), str(folder), *program]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        status = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
        output.seek(0)
        said = "".join(output.readlines()[-LAST_LINES:])
    if status != 0:
        raise CannotVerifyError(f"the script fails with {called} (exit status {status}). Its last lines:\n{said}")
    if not (folder / TRAINER_STATE_NAME).is_file():
        raise CannotVerifyError(f"the script ended with {called} without a training, so there is nothing to compare")
    (run,), _ = read_folders([str(folder)])
    return run


def _difference(logs: LogComparison, weights: str | None) -> str:
    if logs.step is None:
        return f"different: all {logs.equal} logged values are equal, and weights differ: {weights}"
    lines = [f"different: first at step {logs.step}, after {logs.equal} equal values"]
    for name, (theirs, ours) in logs.differing.items():
        gap = f" (difference {ours - theirs:.3g})" if isinstance(theirs, float) and isinstance(ours, float) else ""
        lines.append(f"  {name}: {theirs} with transformers, {ours} with littrainer{gap}")
    return "\n".join(lines)


def _causes(theirs: Run, ours: Run, logs: LogComparison) -> Iterator[str]:
    """What usually causes a difference like this one."""
    for name, one, other in causes(theirs, ours):
        yield f"the script itself, which sets {name} to {one} with transformers and to {other} with littrainer"
    arguments = away_from_defaults(ours.arguments or {}, default_texts())
    for name, topic in KNOWN_DIFFERENCES.items():
        if name in arguments:
            yield f"{name}={arguments[name]}: differs on purpose in some cases, see docs/known-differences.md#{topic}"
    installed = version_of("transformers")
    if installed != COMPARED_WITH:
        yield f"transformers {installed} is installed, and littrainer has the numbers of {COMPARED_WITH}"
    names, first = set(logs.differing), min(logged_values(theirs.state.log_history), default=0)
    if logs.step is None:
        yield "what is done after the last step: a best model that is loaded, a callback, an override of saving"
    elif any(NOT_LOGGED in pair for pair in logs.differing.values()):
        yield "a value that one side logs alone: an override of log() or evaluate(), or a callback"
    elif all(name.startswith("eval_") for name in names):
        yield "the evaluation alone: compute_metrics that draws random numbers, generation, or a loader of the script"
    elif logs.step == first and "loss" in names:
        yield "the first loss: initial weights or data, which were drawn by another generator or in another order"
    elif "loss" not in names:
        yield "the update and not the loss: clipping, the optimizer or the schedule, or a callback that changes them"
    else:
        yield "a step in the middle: random draws in the data, the collator or a callback, or what depends on time"
    if ours.environment["device"] != "cpu":
        yield "kernels of the GPU that add in another order each time; full_determinism=True makes torch choose others"
    yield "code that asks which Trainer it has: the module of the class, or private attributes"
