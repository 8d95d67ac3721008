"""The command `littrainer verify`: compares a script's numbers with those of transformers' Trainer."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from littrainer.arguments.shown_arguments import format_defaults, select_non_defaults
from littrainer.checkpoint.layout import TRAINER_STATE_NAME
from littrainer.commands import differences, recorded_training
from littrainer.commands.command_line import STANDARD_INPUT, BadInput, ProgramParser
from littrainer.commands.compare import find_causes
from littrainer.commands.env import get_version
from littrainer.commands.recorded_training import LITTRAINER, TRANSFORMERS
from littrainer.commands.report_folders import Run, load_folders
from littrainer.distributed.environment import is_launched
from littrainer.redirection.redirect import STARTUP_FOLDER, extend_to_children

DESCRIPTION = """\
Run the first steps of a script's first training, an evaluation and a save twice: with transformers' own Trainer and
with littrainer's, each in a separate process. Compare what they log at each step, the metrics and the weights. The
script writes into temporary folders instead of its output_dir; trackers and the Hub are left out. Exit status: 0 if all
is equal, 1 if something differs, 2 if the script does not run with one of them.
"""
SIDES = {TRANSFORMERS: "transformers' own Trainer", LITTRAINER: "littrainer's Trainer"}
END, WEIGHTS = sys.maxsize, "weights"
# Allowed multiple of the noise: the difference between two runs of the same Trainer.
NOISE_FACTOR = 4
# Larger noise, relative to the loss, is no rounding.
MAX_NOISE = 0.01
MAX_OUTPUT_LINES = 15
COMPARED_WITH = "5.23.0"
# Argument with another value than its default -> topic in docs/known-differences.md.
INTENDED_DIFFERENCES = {
    **dict.fromkeys(("label_smoothing_factor", "optim_args"), "loss-and-optimizer"),
    "sortish_sampler": "data",
    "dataloader_persistent_workers": "evaluation",
    "fsdp": "several-processes-and-devices",
}


def main(words: Sequence[str]) -> int:
    parser = ProgramParser("verify", DESCRIPTION)
    parser.add_argument("--steps", metavar="N", type=int, default=20, help="optimizer steps to compare (default: 20)")
    options, program = parser.parse_program(words)
    if program[0] == STANDARD_INPUT:
        raise BadInput("standard input cannot be read for both sides; give a script")
    if options.steps < 1:
        raise BadInput("give at least one of --steps")
    if is_launched():
        raise BadInput("it compares trainings in one process; start it without a launcher")
    if missing := " ".join(name for name in ("transformers", "accelerate") if find_spec(name) is None):
        raise BadInput(f"transformers' own Trainer needs {missing}: pip install {missing}")
    with tempfile.TemporaryDirectory(prefix="littrainer-verify-") as folder:
        return _verify(program, options.steps, Path(folder))


def _verify(program: list[str], steps: int, folder: Path) -> int:
    theirs, ours = (_record_run(program, steps, folder / side, side) for side in SIDES)
    expected, actual = _collect_values(theirs), _collect_values(ours)
    comparison, is_reproducible = differences.compare_logs(expected, actual, {}), True
    noise: dict[str, float] = {}
    if comparison.step is not None:
        for side, first in zip(SIDES, (expected, actual), strict=True):
            second = _collect_values(_record_run(program, steps, folder / f"{side} again", side))
            for name, gap in differences.find_largest_gaps(first, second).items():
                noise[name] = max(noise.get(name, 0.0), gap)
        largest_loss = max((abs(value) for (_, name), value in expected.items() if name == "loss"), default=0.0)
        is_reproducible = noise.get("loss", 0.0) <= MAX_NOISE * largest_loss and all(map(math.isfinite, noise.values()))
        if is_reproducible:
            tolerances = {name: NOISE_FACTOR * gap for name, gap in noise.items()}
            comparison = differences.compare_logs(expected, actual, tolerances)
    shown = ", ".join(f"{name} by up to {gap:.3g}" for name, gap in noise.items())
    if comparison.step is None:
        weights = sum(weight.numel() for weight in actual[END, WEIGHTS].values())
        print(
            f"{'equal but for rounding' if noise else 'equal, bit for bit'}: {comparison.equal - 1} logged values of "
            f"{ours.state.global_step} steps, and {weights:,} weights ({ours.environment['device']})"
        )
        if noise:
            print(f"Two runs with the same Trainer differ as much: {shown}.")
        return 0
    if comparison.step == END:
        gaps = {
            name: gap for name, gap in differences.compute_weight_gaps(*comparison.differing[WEIGHTS]).items() if gap
        }
        name = max(gaps, key=gaps.__getitem__)
        print(f"different: all {comparison.equal} logged values are equal, and {len(gaps)} weights differ, most {name}")
        print(f"  by up to {gaps[name]:.3g}")
    else:
        print(f"different: first at step {comparison.step}, after {comparison.equal} equal values")
        for name, (left, right) in comparison.differing.items():
            is_number = isinstance(left, float) and isinstance(right, float)
            difference = f" (difference {right - left:.3g})" if is_number else ""
            print(f"  {name}: {left} with transformers, {right} with littrainer{difference}")
    print("Usual causes:")
    if not is_reproducible:
        print("- numbers that the script does not repeat, since they come from the clock or the system: two runs with")
        print(f"  the same Trainer differ, {shown}")
    print(*(f"- {cause}" for cause in _describe_causes(theirs, ours, comparison)), sep="\n")
    return 1


def _collect_values(run: Run) -> differences.Logs:
    return {**run.logged, (END, WEIGHTS): differences.load_saved_weights(run.folder)}


def _record_run(program: list[str], steps: int, folder: Path, side: str) -> Run:
    """Run the script with a side's Trainer in a new process.

    Raises:
        BadInput: the script fails, or does not train.
    """
    folder.mkdir()
    environment = {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "0", **os.environ, "WANDB_MODE": "disabled"}
    # transformers would use several GPUs in a single process, with larger batches.
    environment["CUDA_VISIBLE_DEVICES"] = environment["CUDA_VISIBLE_DEVICES"].partition(",")[0]
    extend_to_children(environment)
    if side == TRANSFORMERS:
        environment["PYTHONPATH"] = environment["PYTHONPATH"].removeprefix(STARTUP_FOLDER).removeprefix(os.pathsep)
    print(f"littrainer verify: {steps} steps with {SIDES[side]}", file=sys.stderr, flush=True)
    command = [sys.executable, recorded_training.__file__, side, str(steps), str(folder), *program]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if (refusal := folder / recorded_training.REFUSAL_NAME).is_file():
        raise BadInput(
            f"the script {refusal.read_text('utf-8')}, so transformers' own Trainer trains nothing to compare with"
        )
    if process.returncode != 0:
        lines = "\n".join(process.stdout.decode("utf-8", "replace").splitlines()[-MAX_OUTPUT_LINES:])
        raise BadInput(
            f"the script fails with {SIDES[side]} (exit status {process.returncode}). Its last lines:\n{lines}"
        )
    if not (folder / TRAINER_STATE_NAME).is_file():
        raise BadInput(f"the script ended with {SIDES[side]} without a training, so there is nothing to compare")
    (run,), _ = load_folders([str(folder)])
    return run


def _describe_causes(theirs: Run, ours: Run, comparison: differences.LogComparison) -> Iterator[str]:
    for name, left, right in find_causes(theirs, ours):
        yield f"the script itself, which sets {name} to {left} with transformers and to {right} with littrainer"
    arguments = select_non_defaults(ours.arguments or {}, format_defaults())
    for name, topic in INTENDED_DIFFERENCES.items():
        if name in arguments:
            yield f"{name}={arguments[name]}: differs on purpose in some cases, see docs/known-differences.md#{topic}"
    installed = get_version("transformers")
    if installed != COMPARED_WITH:
        yield f"transformers {installed} is installed, and littrainer has the numbers of {COMPARED_WITH}"
    names = comparison.differing
    if comparison.step == END:
        yield "what is done after the last step: a best model that is loaded, a callback, or a save"
    elif any(differences.NOT_LOGGED in pair for pair in names.values()):
        yield "a value that one side logs alone: an override of log() or evaluate(), or a callback"
    elif all(name.startswith("eval_") for name in names):
        yield "the evaluation alone: compute_metrics that draws random numbers, generation, or a loader"
    elif "loss" not in names:
        yield "the update and not the loss: clipping, optimizer or schedule, or a callback"
    elif comparison.equal == 0:
        yield "the first loss: initial weights or data, drawn by another generator or in another order"
    else:
        yield "a step in the middle: random draws in the data, the collator or a callback, or what depends on time"
    if ours.environment["device"] != "cpu":
        yield "kernels of the GPU that add in another order each time; full_determinism=True makes torch choose others"
    yield "code that asks which Trainer it has: the module of the class, or private attributes"
