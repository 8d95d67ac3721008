"""Writes the tables of docs/strategies.md: `python -m tests.docs.strategy_tables docs/strategies.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from littrainer.arguments.deepspeed import FROM_ARGUMENTS, FROM_HIDDEN_SIZE, FROM_LENGTH, SETTINGS
from littrainer.distributed.layout import SIZE_VARIABLE_PREFIX, SIZES
from littrainer.strategies.choice import STRATEGIES
from littrainer.strategies.data_parallel import DDP_KEYWORDS
from littrainer.strategies.model_parallel import MODEL_PARALLEL_KEYWORDS
from littrainer.strategies.tensor_parallel import STYLES

BEGIN = "<!-- tables: written by python -m tests.docs.strategy_tables docs/strategies.md -->"
END = "<!-- end of tables -->"

# Strategy -> what asks for it, the class of Lightning's that carries it out, and what each process holds.
MEANING: dict[str, tuple[str, str, str]] = {
    "DeepSpeed": (
        "`deepspeed`, or `accelerate launch --use_deepspeed`",
        "`DeepSpeedStrategy`",
        "a part of the optimizer states (stage 1), gradients too (2), parameters too (3)",
    ),
    "FSDP version 1": (
        "`fsdp` with `fsdp_config={'version': 1}`",
        "`FSDPStrategy`",
        "a part of parameters, gradients and optimizer states; needs GPUs",
    ),
    "FSDP": (
        "`fsdp`, or `accelerate launch --use_fsdp`",
        "`ModelParallelStrategy`",
        "the same, on CPUs too; with `tp_size` above 1, of slices of layers",
    ),
    "tensor parallel": (
        "`parallelism_config` with `tp_size` above 1, or a model that transformers has split",
        "`ModelParallelStrategy`",
        "a slice of each layer in the model's plan, and the other layers",
    ),
    "single device": ("one process", "`SingleDeviceStrategy`", "the model"),
    "DDP": ("several processes", "`DDPStrategy`", "a copy of the model"),
}
# Size of the layout -> what differs between the processes of that dimension.
DIMENSIONS: dict[str, str] = {
    "dp_replicate_size": "copies of the model, each on different data",
    "dp_shard_size": "parts of one copy's parameters, each on different data (`fsdp`)",
    "cp_size": "parts of each row, of which keys and values are gathered",
    "sp_size": "parts of each row, and in attention parts of the heads",
    "tp_size": "slices of each layer, on the same data",
}


def strategy_tables() -> str:
    """The tables as Markdown, made from what carries the arguments out."""
    return "\n".join(
        [
            "The first matching row wins.\n",
            _table(
                ("strategy", "asked for by", "in Lightning", "each process holds"),
                ((name, *MEANING[name]) for name in STRATEGIES),
            ),
            "### DDP\n",
            _table(
                ("argument", "`DDPStrategy` argument"),
                ((f"`{argument}`", f"`{keyword}`") for argument, keyword in DDP_KEYWORDS.items()),
            ),
            "### DeepSpeed\n",
            "`DeepSpeedStrategy(config=)` gets the configuration, its `process_group_backend` and `timeout` are\n"
            "`ddp_backend` and `ddp_timeout`. The arguments fill in `auto`:\n",
            _table(
                ("key", '`"auto"` becomes', "another value"),
                [
                    *((f"`{key}`", source, "refused") for key, (source, _) in FROM_ARGUMENTS.items()),
                    *((f"`{key}`", source, "refused") for key, (source, _) in FROM_LENGTH.items()),
                    *(
                        (
                            f"`{key}`",
                            f"at hidden size 1000: {value(1000)}{' (stage 3)' if in_stage_3 else ''}",
                            "kept",
                        )
                        for key, (value, in_stage_3) in FROM_HIDDEN_SIZE.items()
                    ),
                    ("`scheduler.params.warmup_min_lr`", "`0`", "kept"),
                    *(
                        (f"`{setting.key}`", f"`{setting.initial_value}`", "kept")
                        for setting in SETTINGS
                        if setting.key.startswith("zero_optimization.")
                    ),
                ],
            ),
            "### Layout and tensor parallelism\n",
            _table(
                ("key of `parallelism_config`", "environment", "processes hold"),
                ((f"`{name}`", f"`{SIZE_VARIABLE_PREFIX}{name.upper()}`", DIMENSIONS[name]) for name in SIZES),
            ),
            _table(
                ("argument", "`ModelParallelStrategy` argument"),
                ((f"`{argument}`", f"`{keyword}`") for argument, (keyword, _) in MODEL_PARALLEL_KEYWORDS.items()),
            ),
            _table(
                ("style of a plan", "for"),
                ((f"`{name}`", f"`{style.layer.__name__}`") for name, style in STYLES.items()),
            ).rstrip("\n"),
        ]
    )


def add_tables(page: str) -> str:
    """A page with today's tables between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"The page needs the lines {BEGIN!r} and {END!r}, between which the tables are."
    return f"{before}{BEGIN}\n\n{strategy_tables()}\n\n{END}{after}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.write_text(add_tables(place.read_text(encoding="utf-8")), encoding="utf-8")
