"""How long does it take to order samples by length, as group_by_length does?

Samples are those of `datasets`: as loaded, shuffled by indices, or with a column that holds their lengths. Timed are
the making of the sampler, which computes lengths, and the first order of an epoch; both sides give the same order.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..benchmark import Benchmark, Case, Measured
from ..figures import Figures, markdown
from ..sides import EARLIER, OURS, THEIRS, Side
from ..stopwatch import timed

FORMS = {"loaded": "as loaded", "shuffled": "shuffled by indices", "column": "with a column of lengths"}
SAMPLERS = {"littrainer": "littrainer.data.samplers", "transformers": "transformers.trainer_pt_utils"}
BATCH_SIZE = 8
LONGEST = 64


def rows_of_lengths(rows: int) -> Any:
    """A `datasets.Dataset` of token ids, and of their number."""
    import pyarrow
    from datasets import Dataset

    lengths = torch.randint(1, LONGEST, (rows,), generator=torch.Generator().manual_seed(0))
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(torch.int32).numpy()
    ids = pyarrow.ListArray.from_arrays(pyarrow.array(ends), pyarrow.array(range(int(ends[-1]))))
    return Dataset(pyarrow.table({"input_ids": ids, "length": pyarrow.array(lengths.numpy())}))


def measure(side: Side, rows: int, form: str) -> Measured:
    """Milliseconds until the first order of an epoch is there."""
    samplers: Any = importlib.import_module(SAMPLERS[side.library])
    data = rows_of_lengths(rows)
    if form == "shuffled":
        data = data.shuffle(seed=1)
    order: list[int] = []

    def group() -> None:
        known = {"lengths": data["length"]} if form == "column" else {"dataset": data}
        generator = torch.Generator().manual_seed(0)
        order.extend(samplers.LengthGroupedSampler(BATCH_SIZE, **known, generator=generator))

    took = timed(group)
    if sorted(order) != list(range(rows)):
        raise RuntimeError(f"{side.name} gave {len(set(order))} different indices for {rows} samples")
    return {"cpu_ms": took["cpu_s"] * 1e3, "wall_ms": took["wall_s"] * 1e3}


def cases(sizes: tuple[int, ...]) -> tuple[Case, ...]:
    """Growing numbers as loaded, and the largest one in the other forms."""
    shapes = [*((rows, "loaded") for rows in sizes), (sizes[-1], "shuffled"), (sizes[-1], "column")]
    return tuple(
        Case(
            f"{form}-{rows}",
            f"{rows} samples, {FORMS[form]}",
            (OURS, THEIRS, EARLIER),
            {"rows": rows, "form": form},
            curve="rows" if form == "loaded" else "",
        )
        for rows, form in shapes
    )


def table(figures: Figures) -> str:
    rows = [
        (
            figures.title(case),
            figures.shown(side),
            f"{figures.median(case, side, 'cpu_ms'):.1f}",
            figures.spread(case, side, "cpu_ms", ".1f"),
            f"{figures.median(case, side, 'wall_ms'):.1f}",
            f"{figures.ratio(case, side, THEIRS.name, 'cpu_ms'):.3f}",
        )
        for case in figures.cases
        for side in figures.sides(case)
    ]
    columns = ("samples", "side", "CPU ms", "range", "wall ms", "as a multiple of transformers'")
    return markdown(columns, rows, names=2)


BENCHMARK = Benchmark(
    name="length_grouping",
    question="How long does it take to order samples by length?",
    measure=measure,
    full=cases((1_000, 5_000, 10_000)),
    short=cases((50, 100)),
    rounds=2,
    tables={"length-grouping": table},
)
