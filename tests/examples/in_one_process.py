"""Runs examples one after the other: `littrainer run tests/examples/in_one_process.py FOLDER "NAME.py OPTIONS" ...`.

Loading torch, Lightning and transformers takes longer than an example at a small setting. Each example runs in its
folder within FOLDER, and writes there its output (`stdout`, `stderr`) and, in `facts.json`, the module
of its Trainer and the traceback if it failed. Under `--devices 2` both processes run each
example, and have the folders FOLDER/0 and FOLDER/1.
"""

from __future__ import annotations

import asyncio
import email
import json
import logging
import os
import runpy
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def use_few_texts() -> None:
    """Reading the whole standard library, and a machine's message catalogues, takes longer than the trainings."""
    import local_texts

    files = [
        (path, f"{package.__name__}.{path.stem}")
        for package in (asyncio, email)
        for path in sorted(Path(package.__path__[0]).glob("*.py"))
    ]
    local_texts.source_files = lambda: iter(files)
    local_texts.catalogues = dict


def run_one(folder: Path, name: str, options: list[str]) -> None:
    """Run an example in `folder`, with all output in files there, output past sys.stdout included."""
    folder.mkdir(parents=True)
    facts: dict[str, Any] = {"traceback": None}
    here, descriptors, logged = Path.cwd(), (os.dup(1), os.dup(2)), logging.root.handlers[:]
    for number, stream in ((1, "stdout"), (2, "stderr")):
        with (folder / stream).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    sys.argv = [name, *options]
    try:
        names = runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        facts["trainer_module"] = getattr(names.get("Trainer") or names.get("Seq2SeqTrainer"), "__module__", None)
    except BaseException:
        facts["traceback"] = traceback.format_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.chdir(here)
        logging.root.handlers[:] = logged
        for number, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    use_few_texts()
    place, *lines = sys.argv[1:]
    if "RANK" in os.environ:
        place = os.path.join(place, os.environ["RANK"])
    for line in lines:
        script, *rest = shlex.split(line)
        run_one(Path(place).absolute() / Path(script).stem, script, rest)
