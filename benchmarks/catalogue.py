"""All benchmarks, in the order in which they are taken and shown."""

from __future__ import annotations

from .benchmark import Benchmark
from .measured import (
    checkpoints,
    counts,
    data_parallel,
    evaluation,
    evaluation_memory,
    imports,
    length_grouping,
    resuming,
    routes,
    search_memory,
    simulated_gpu,
    startup,
    step,
    throughput,
    training_memory,
)

BENCHMARKS: dict[str, Benchmark] = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (
        counts,
        routes,
        step,
        throughput,
        imports,
        startup,
        resuming,
        length_grouping,
        evaluation,
        evaluation_memory,
        training_memory,
        search_memory,
        simulated_gpu,
        checkpoints,
        data_parallel,
    )
}
