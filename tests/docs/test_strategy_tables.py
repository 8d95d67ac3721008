from __future__ import annotations

import inspect
from pathlib import Path

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.nn.parallel import DistributedDataParallel

from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.strategies.data_parallel import DDP_KEYWORDS
from littrainer.strategies.model_parallel import MODEL_PARALLEL_KEYWORDS
from tests.docs.strategy_tables import add_tables

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"


def test_the_tables_on_the_page_are_what_the_strategies_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == add_tables(page), "run: python -m tests.docs.strategy_tables docs/strategies.md"


def test_keywords_are_lightnings_or_torchs_and_arguments_are_there() -> None:
    of_ddp = {
        *inspect.signature(DDPStrategy.__init__).parameters,
        *inspect.signature(DistributedDataParallel.__init__).parameters,
    }
    assert set(DDP_KEYWORDS.values()) <= of_ddp
    of_model_parallel = set(inspect.signature(ModelParallelStrategy.__init__).parameters)
    assert {keyword for keyword, _ in MODEL_PARALLEL_KEYWORDS.values()} <= of_model_parallel
    names = set(TrainingArguments.__dataclass_fields__)
    assert {argument.partition(".")[0] for argument in (*DDP_KEYWORDS, *MODEL_PARALLEL_KEYWORDS)} <= names
