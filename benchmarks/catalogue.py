"""All benchmarks, in the order in which they are taken and shown."""

from __future__ import annotations

from .measured import (
    step,
)

BENCHMARKS = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (
        step,
    )
}
