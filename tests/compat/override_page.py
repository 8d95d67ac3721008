"""The section about override points in docs/compatibility.md: `python -m tests.compat.override_page FILE` writes it.

Its table is measured: what the scenarios in tests/fidelity/cases/overrides.py note with our Trainer, which the fidelity
tests compare with what they note with transformers' own.
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from littrainer.training.overrides import NEVER_CALLED, SIGNATURES
from tests.fidelity.cases.overrides import (
    overriding_every_method_and_calling_the_parents,
    overriding_every_method_while_resuming,
)
from tests.fidelity.side import OURS, Side
from tests.scenarios.overrides import OVERRIDE_POINTS

HEADING, NEXT = "## Override points\n", "\n## "

INTRODUCTION = """
A subclass may override every method in this table, on the class or on the instance, with or without calling its
parent. The table is measured: a subclass that overrides all of them at once notes each call and calls its parent, in a
training of six optimizer steps with three evaluations and two checkpoints, an `evaluate()`, a `predict()` and a
`save_model()` (first number), and in one that resumes for two steps (second number). Under transformers 5.23.0 the same
subclass notes the same calls, with arguments of the same kinds given in the same way, and both leave the same numbers,
bit for bit (`tests/fidelity/cases/overrides.py`; overrides that change what is done are in `overriding.py` beside it).

| method | calls | arguments |
| --- | ---: | --- |
"""

BEYOND_THE_TABLE = """
- `training_step` puts the training into Lightning's manual optimization; it is called once for each micro-batch with
  `(model, inputs, num_items_in_batch)`, and may call `self.accelerator.backward` as often as it likes.
- `create_optimizer`, `_wrap_model` and `create_scheduler` are called in this order, as in transformers 5, where nothing
  calls `create_optimizer_and_scheduler`. Where that one is overridden it is called once, with `num_training_steps`,
  before `_wrap_model`, as in transformers 4.
- `_get_output_dir` is asked once more than there, when a training begins, for the folder that it claims. `get_tp_size`,
  `get_cp_size` and `get_sp_size` are asked once, for the samples of an optimizer step. `_update_auto_batch_size` is
  called with each size that `auto_find_batch_size` tries.
- In the trials of a hyperparameter search the same methods are called as often, with the trial in the place of None;
  measured too (`tests/fidelity/cases/search_overrides.py`). In other trainings `_hp_search_setup` comes first
  of all, and in transformers after the model. Ray Tune's trials call `_tune_save_checkpoint`.
- `_inner_training_loop` without its parent takes the place of the whole training.
- `_save_optimizer_and_scheduler`, `_save_scaler` and `_save_rng_state` may write files of their own, which become part
  of the sealed checkpoint. Files that only an overridden `_load_optimizer_and_scheduler` or `_load_rng_state` reads
  need not be there to resume. With `async_save`, training waits for checkpoints that a subclass writes itself.
- Whether `training_step` is overridden is asked when a training and when an epoch begins, and decides between automatic
  and manual optimization; in automatic optimization `training_step` is not called. The other methods of a step are
  called on the Trainer in every step, overridden or not.
"""

EARLIER = """
Overrides in the spelling of an earlier release, which lack parameters that were added since, are called with what they
take, with a FutureWarning; transformers 5 raises at them:

| method | may lack |
| --- | --- |
"""

REFUSED = """
What Lightning's engine never calls is refused when the Trainer is made, or where it was set later when it trains, in
one error that names all such methods:

| method | what to do instead |
| --- | --- |
"""


def measured_calls(folder: Path) -> list[dict[str, dict[str, int]]]:
    """What both scenarios note with our Trainer: method -> its calls written out -> their number."""
    calls = []
    before = Path.cwd()
    scripts = (overriding_every_method_and_calling_the_parents, overriding_every_method_while_resuming)
    for script in scripts:
        place = folder / script.__name__
        place.mkdir()
        os.chdir(place)
        try:
            random.seed(20)
            np.random.seed(20)
            torch.manual_seed(20)
            calls.append(script(Side(OURS, "automatic", place)).extra["calls"])
        finally:
            os.chdir(before)
    return calls


def section(calls: list[dict[str, dict[str, int]]]) -> str:
    """The section's text."""
    rows = []
    for name in sorted(OVERRIDE_POINTS):
        made = [found.get(name, {}) for found in calls]
        if any(made):
            numbers = " / ".join(str(sum(ways.values())) for ways in made)
            rows.append(f"| `{name}` | {numbers} | {_written(made)} |\n")
    earlier = "".join(
        f"| `{name}` | {', '.join(f'`{added}`' for added in (*signature.by_place, *signature.by_keyword))} |\n"
        for name, signature in SIGNATURES.items()
    )
    refused = "".join(f"| `{name}` | {instead} |\n" for name, instead in NEVER_CALLED.items())
    return f"{HEADING}{INTRODUCTION}{''.join(rows)}{BEYOND_THE_TABLE}{EARLIER}{earlier}{REFUSED}{refused}"


def _written(made: list[Mapping[str, int]]) -> str:
    # Shapes and the columns of the batch are the example's own.
    generic = dict.fromkeys(
        re.sub(r"(int64|float32)\[[^]]*\]", "tensor", re.sub(r"\{[^}]*\}", "dict", way))
        for ways in made
        for way in ways
    )
    return "<br>".join(f"`{way}`" for way in generic)


def with_section(page: str, text: str) -> str:
    """The page with this text in the place of its section."""
    start = page.index(HEADING)
    end = page.find(NEXT, start + len(HEADING))
    return page[:start] + text + (page[end:] if end >= 0 else "")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        path.write_text(with_section(path.read_text("utf-8"), section(measured_calls(Path(folder)))), "utf-8")
