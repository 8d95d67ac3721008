"""Learning-rate schedules as the lines of a plain program."""

from __future__ import annotations

from littrainer.arguments.choices import SchedulerType
from littrainer.arguments.training_arguments import TrainingArguments

METRIC_SCHEDULE = "reduce_lr_on_plateau"

_SHARE = "share = (step - warmup) / max(1, total - warmup)"

# Schedule -> lines after the warmup, in terms of `step`, `warmup`, `total` and the settings below.
LINES_AFTER_WARMUP: dict[str, tuple[str, ...]] = {
    "linear": ("return max(0.0, (total - step) / max(1, total - warmup))",),
    "cosine": (_SHARE, "return max(0.0, 0.5 * (1 + math.cos(2 * math.pi * NUM_CYCLES * share)))"),
    "cosine_with_restarts": (
        _SHARE,
        "return 0.0 if share >= 1 else max(0.0, 0.5 * (1 + math.cos(math.pi * (NUM_CYCLES * share % 1))))",
    ),
    "polynomial": (
        "if step > total:",
        "    return LR_END / LEARNING_RATE",
        "remaining = 1 - (step - warmup) / (total - warmup)",
        "return ((LEARNING_RATE - LR_END) * remaining**POWER + LR_END) / LEARNING_RATE",
    ),
    "constant": ("return 1.0",),
    "constant_with_warmup": ("return 1.0",),
    "inverse_sqrt": (
        "timescale = TIMESCALE or warmup or 10_000",
        "return 1 / math.sqrt((step + timescale - warmup) / timescale)",
    ),
    "cosine_with_min_lr": (
        _SHARE,
        "wave = 0.5 * (1 + math.cos(2 * math.pi * NUM_CYCLES * share))",
        "lowest = MIN_LR / LEARNING_RATE if MIN_LR_RATE is None else MIN_LR_RATE",
        "return max(0.0, wave * (1 - lowest) + lowest)",
    ),
}

# Schedule -> its settings with their defaults.
SETTINGS: dict[str, dict[str, float | None]] = {
    "cosine": {"num_cycles": 0.5},
    "cosine_with_restarts": {"num_cycles": 1},
    "polynomial": {"lr_end": 1e-7, "power": 1.0},
    "inverse_sqrt": {"timescale": None},
    "cosine_with_min_lr": {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None},
}


def schedule_constants(args: TrainingArguments) -> list[str]:
    """Lines that set the schedule's settings."""
    name = SchedulerType(args.lr_scheduler_type).value
    given = dict(args.lr_scheduler_kwargs or {})  # type: ignore[arg-type]
    return [f"{key.upper()} = {given.get(key, usual)!r}" for key, usual in SETTINGS.get(name, {}).items()]


def schedule_function(args: TrainingArguments) -> list[str]:
    """Lines of a function that makes the schedule of an optimizer for a number of optimizer steps."""
    name = SchedulerType(args.lr_scheduler_type).value
    head = ["def make_schedule(optimizer: torch.optim.Optimizer, total: int) -> Any:"]
    if name == METRIC_SCHEDULE:
        settings = "".join(f", {key}={value!r}" for key, value in (args.lr_scheduler_kwargs or {}).items())  # type: ignore[union-attr]
        return [*head, f"    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer{settings})"]
    warmup = [f"    warmup = {_warmup(args)}"] if name != "constant" else []
    if name not in LINES_AFTER_WARMUP:
        return [
            *head,
            "    from littrainer.optim.schedules import get_scheduler",
            "",
            *warmup,
            f"    return get_scheduler({name!r}, optimizer, warmup, total, {args.lr_scheduler_kwargs or {}!r})",
        ]
    rise = ["        if step < warmup:", "            return step / max(1, warmup)"] if warmup else []
    return [
        *head,
        *warmup,
        "",
        "    def factor(step: int) -> float:",
        *rise,
        *(f"        {line}" for line in LINES_AFTER_WARMUP[name]),
        "",
        "    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)",
    ]


def _warmup(args: TrainingArguments) -> str:
    if args.warmup_steps >= 1:
        return str(int(args.warmup_steps))
    return f"math.ceil(total * {args.warmup_steps})" if args.warmup_steps else "0"
