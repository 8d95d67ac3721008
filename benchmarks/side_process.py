"""A process of a side: reads what it shall measure line by line, and answers each with what it measured.

`python -m benchmarks.side_process [LIBRARY]` imports that library first, and answers when it has.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import warnings
from typing import Any


def answer(request: str) -> dict[str, float]:
    """Take one measurement; only what it needs is imported, since that counts where a process is a fresh one."""
    from .sides import Side

    benchmark, name, library, variant, settings = json.loads(request)
    measure: Any = importlib.import_module(f"benchmarks.measured.{benchmark}").measure
    gc.collect()
    return measure(Side(name, library, variant=variant), **settings)


def main() -> None:
    # Answers keep the place where they are read; what libraries print goes where errors go.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.filterwarnings("ignore")
    for library in sys.argv[1:]:
        # Trainers are public names that are resolved when they are asked for.
        getattr(importlib.import_module(library), "Trainer", None)
        print(json.dumps(library), file=answers, flush=True)
    for request in sys.stdin:
        print(json.dumps(answer(request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
