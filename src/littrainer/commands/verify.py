"""The command `littrainer verify`: are the numbers those of transformers' own Trainer?"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from littrainer.arguments.shown_arguments import away_from_defaults, default_texts
from littrainer.checkpoint.layout import TRAINER_STATE_NAME
from littrainer.commands import differences, recorded_training
from littrainer.commands.command_line import CommandParser, complain
from littrainer.commands.compare import causes
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
SIDES = {TRANSFORMERS: "transformers' own Trainer", LITTRAINER: "littrainer's Trainer"}
# Stand for a step and a name among what was logged, for the weights that were saved.
END, WEIGHTS = sys.maxsize, "weights"
# By so many times what a Trainer differs from itself in two runs two Trainers may differ. What is more than a share of
# the loss is no rounding.
TIMES_THE_NOISE, LARGEST_NOISE = 4, 0.01
# What is shown of a script that fails.
LAST_LINES = 15
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
    parser.add_argument("--steps", metavar="N", type=int, default=20, help="optimizer steps to compare (default: 20)")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module and no script")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT", help="script to run, with its arguments")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer verify`; returns the exit status."""
    options = build_parser().parse_args(words)
    name = next(iter(options.program), "")
    try:
        if not name or options.steps < 1:
            raise ValueError("name a SCRIPT, or -m MODULE, after the options, and give at least one of --steps")
        if not options.is_module and not os.path.isfile(name):
            raise ValueError(f"no script {name!r} (looked in {os.path.abspath(os.path.dirname(name))})")
        if is_launched():
            raise ValueError("it compares trainings in one process; start it without a launcher")
        with tempfile.TemporaryDirectory(prefix="littrainer-verify-") as folder:
            return _verify(["-m"] * options.is_module + options.program, options.steps, Path(folder))
    except (NothingToReport, ValueError) as error:
        return complain("verify", str(error))


def _verify(program: list[str], steps: int, folder: Path) -> int:
    sides = [_recorded(program, steps, folder / side, side) for side in SIDES]
    ours, values = sides[1], [_values_of(run) for run in sides]
    found, noise, repeats = differences.compare_logs(*values, {}), {}, True
    if found.step is not None:
        # By what each side differs from itself in a second run, the two may differ too.
        noise = _noise(
            values, [_values_of(_recorded(program, steps, folder / f"{side} again", side)) for side in SIDES]
        )
        largest_loss = max((abs(value) for (_, name), value in values[0].items() if name == "loss"), default=0.0)
        repeats = noise.get("loss", 0.0) <= LARGEST_NOISE * largest_loss and all(map(math.isfinite, noise.values()))
        if repeats:
            tolerances = {name: TIMES_THE_NOISE * gap for name, gap in noise.items()}
            found = differences.compare_logs(*values, tolerances)
    shown = ", ".join(f"{name} by up to {gap:.3g}" for name, gap in noise.items())
    if found.step is None:
        numbers = sum(weight.numel() for weight in values[1][END, WEIGHTS].values())
        print(
            f"{'equal but for rounding' if noise else 'equal, bit for bit'}: {found.equal - 1} logged values of "
            f"{ours.state.global_step} steps, and {numbers:,} weights ({ours.environment['device']})"
        )
        if noise:
            print(f"Two runs with the same Trainer differ as much: {shown}.")
        return 0
    if found.step == END:
        weights = differences.first_difference(*found.differing[WEIGHTS], place=WEIGHTS)
        print(f"different: all {found.equal} logged values are equal, and {weights}")
    else:
        print(f"different: first at step {found.step}, after {found.equal} equal values")
        for name, (one, other) in found.differing.items():
            gap = f" (difference {other - one:.3g})" if isinstance(one, float) and isinstance(other, float) else ""
            print(f"  {name}: {one} with transformers, {other} with littrainer{gap}")
    print("Usual causes:")
    if not repeats:
        print("- numbers that the script does not repeat, since they come from the clock or the system: two runs with")
        print(f"  the same Trainer differ, {shown}")
    for cause in _causes(*sides, found):
        print(f"- {cause}")
    return 1


def _values_of(run: Run) -> differences.Logs:
    return {**run.logged, (END, WEIGHTS): differences.weights_in(run.folder)}


def _noise(ones: Sequence[differences.Logs], again: Sequence[differences.Logs]) -> dict[str, float]:
    """Return by how much runs with the same Trainer differ at most, by the name of the value."""
    noise: dict[str, float] = {}
    for one, other in zip(ones, again, strict=True):
        for place in filter(other.__contains__, one):
            pair, gaps = (one[place], other[place]), [0.0]
            if place == (END, WEIGHTS):
                gaps += differences.weight_gaps(*pair).values()
            elif all(isinstance(value, float) for value in pair):
                gaps.append(abs(pair[0] - pair[1]))
            # A nan is not larger, and leaves no tolerance.
            noise[place[1]] = max(noise.get(place[1], 0.0), *gaps)
    return {name: gap for name, gap in noise.items() if gap}


def _recorded(program: list[str], steps: int, folder: Path, side: str) -> Run:
    """Run the script with one side's Trainer, in a new process.

    Raises:
        ValueError: it fails, or does not train.
    """
    folder.mkdir()
    environment = {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "0", **os.environ, "WANDB_MODE": "disabled"}
    # Transformers would put several GPUs into one process, with larger batches.
    environment["CUDA_VISIBLE_DEVICES"] = environment["CUDA_VISIBLE_DEVICES"].partition(",")[0]
    extend_to_children(environment)
    if side == TRANSFORMERS:
        environment["PYTHONPATH"] = environment["PYTHONPATH"].removeprefix(STARTUP_FOLDER).removeprefix(os.pathsep)
    print(f"littrainer verify: {steps} steps with {SIDES[side]}", file=sys.stderr, flush=True)
    command = [sys.executable, recorded_training.__file__, side, str(steps), str(folder), *program]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        said = "\n".join(done.stdout.decode("utf-8", "replace").splitlines()[-LAST_LINES:])
        raise ValueError(
            f"the script fails with {SIDES[side]} (exit status {done.returncode}). Its last lines:\n{said}"
        )
    if not (folder / TRAINER_STATE_NAME).is_file():
        raise ValueError(f"the script ended with {SIDES[side]} without a training, so there is nothing to compare")
    (run,), _ = read_folders([str(folder)])
    return run


def _causes(theirs: Run, ours: Run, found: differences.LogComparison) -> Iterator[str]:
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
    names, is_one_sided = found.differing, any(differences.NOT_LOGGED in pair for pair in found.differing.values())
    is_evaluation = all(name.startswith("eval_") for name in names)
    # The first that is true.
    likely = {
        "what is done after the last step: a best model that is loaded, a callback, or a save": found.step == END,
        "a value that one side logs alone: an override of log() or evaluate(), or a callback": is_one_sided,
        "the evaluation alone: compute_metrics that draws random numbers, generation, or a loader": is_evaluation,
        "the update and not the loss: clipping, optimizer or schedule, or a callback": "loss" not in names,
        "the first loss: initial weights or data, drawn by another generator or in another order": found.equal == 0,
        "a step in the middle: random draws in the data, the collator or a callback, or what depends on time": True,
    }
    yield next(cause for cause, is_so in likely.items() if is_so)
    if ours.environment["device"] != "cpu":
        yield "kernels of the GPU that add in another order each time; full_determinism=True makes torch choose others"
    yield "code that asks which Trainer it has: the module of the class, or private attributes"
