"""How long do imports and the start of the command line take, and a script from its start to its first step?

Each statement and each command runs in a process of its own, from its start to its end. How many modules it leaves
loaded is counted, which no other process disturbs. The script is `examples/text_classification.py`, which ends where
its first optimizer step would begin: with transformers' Trainer under python, and under `littrainer run`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from ..benchmark import Benchmark, Case, Measured, Processes
from ..figures import Figures, markdown
from ..processes import environment_of
from ..sides import EARLIER, ROOT, Side
from ..stopwatch import timed_process

SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.parse_args()
"""
EXAMPLE = ROOT / "examples" / "text_classification.py"
TO_FIRST_STEP = f"""
import os, runpy, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
register_optimizer_step_pre_hook(lambda *_: os._exit(0))
sys.path.insert(0, {str(EXAMPLE.parent)!r})
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
sys.exit("no step")
"""
LOADED = """
import json, sys
packages = ["torch", "lightning", "transformers", "accelerate", "datasets"]
print(json.dumps([len(sys.modules), [name for name in packages if name in sys.modules]]))
"""
TORCH = Side("import torch", "torch", variant="import torch")
OURS = Side(
    "from littrainer import Trainer, TrainingArguments",
    "littrainer",
    variant="from littrainer import Trainer, TrainingArguments",
)
THEIRS = Side(
    "from transformers import Trainer, TrainingArguments",
    "transformers",
    variant="from transformers import Trainer, TrainingArguments",
)
THEIRS_BEFORE = Side(
    "from transformers import Trainer, TrainingArguments (5.3.0)",
    "transformers",
    EARLIER.folder,
    variant="from transformers import Trainer, TrainingArguments",
)
LIGHTNING = Side("import lightning.pytorch", "lightning", variant="import lightning.pytorch")
PLAIN = Side("python script.py --help", "torch", variant="command")
COMMAND = Side("littrainer run script.py --help", "littrainer", variant="command")
STATEMENTS = (TORCH, OURS, THEIRS, THEIRS_BEFORE, LIGHTNING)
COMMANDS = (PLAIN, COMMAND)
PLAIN_SCRIPT = Side("python text_classification.py", "transformers", variant="script")
RUN_SCRIPT = Side("littrainer run text_classification.py", "littrainer", variant="script")
SCRIPTS = (PLAIN_SCRIPT, RUN_SCRIPT)


def measure(side: Side) -> Measured:
    """Seconds of a process, and after a statement how many modules are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_of(side)
        if side.variant in ("command", "script"):
            script = Path(folder) / "script.py"
            program, options = (
                (SCRIPT, ["--help"]) if side.variant == "command" else (TO_FIRST_STEP, ["--output_dir", folder])
            )
            script.write_text(program)
            before = ["-m", "littrainer", "run"] if side.library == "littrainer" else []
            took, _ = timed_process([sys.executable, *before, str(script), *options], environment)
            return took
        took, output = timed_process([sys.executable, "-c", side.variant + "\n" + LOADED], environment)
    modules, packages = json.loads(output.splitlines()[-1])
    return {**took, "modules": modules, **{f"loads_{name}": 1.0 for name in packages}}


def table(figures: Figures) -> str:
    rows = []
    for case, baseline in (("statements", TORCH.name), ("commands", PLAIN.name), ("script", PLAIN_SCRIPT.name)):
        if case not in figures.cases:
            continue
        for side in figures.sides(case):
            measured = figures.cases[case]["rounds"][side][0]
            packages = [key.removeprefix("loads_") for key in measured if key.startswith("loads_")]
            rows.append(
                (
                    f"`{side}`",
                    f"{figures.median(case, side, 'cpu_s'):.2f}",
                    figures.spread(case, side, "cpu_s", ".2f"),
                    f"{figures.median(case, side, 'wall_s'):.2f}",
                    f"{figures.ratio(case, side, baseline, 'cpu_s'):.2f}",
                    f"{measured['modules']:.0f}" if "modules" in measured else "",
                    ", ".join(packages),
                )
            )
    columns = (
        "process",
        "CPU s",
        "range",
        "wall s",
        "as a multiple of the first of its kind",
        "modules loaded",
        "of the large packages",
    )
    return markdown(columns, rows)


def failures(figures: Figures) -> list[str]:
    """Ours loads no transformers."""
    ours = figures.cases["statements"]["rounds"][OURS.name]
    return ["littrainer's import loads transformers"] if any("loads_transformers" in each for each in ours) else []


BENCHMARK = Benchmark(
    name="imports",
    question="How long do imports and the start of the command line take?",
    measure=measure,
    full=(
        Case("statements", "imports", STATEMENTS, processes=Processes.NONE),
        Case("commands", "command line", COMMANDS, processes=Processes.NONE),
        Case("script", "start of a script to its first step", SCRIPTS, processes=Processes.NONE, rounds=5),
    ),
    short=(
        Case("statements", "imports", (TORCH, OURS), processes=Processes.NONE),
        Case("commands", "command line", COMMANDS, processes=Processes.NONE),
    ),
    rounds=3,
    tables={"imports": table},
    failures=failures,
)
