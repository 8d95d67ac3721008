"""All arguments in their documented positional order."""

from __future__ import annotations

from dataclasses import dataclass

from littrainer.arguments.fields_additional import AdditionalFields
from littrainer.arguments.fields_data import DataFields
from littrainer.arguments.fields_distributed import DistributedFields
from littrainer.arguments.fields_environment import EnvironmentFields
from littrainer.arguments.fields_evaluation import EvaluationFields
from littrainer.arguments.fields_generation import GenerationFields
from littrainer.arguments.fields_logging import LoggingFields
from littrainer.arguments.fields_optimization import OptimizationFields
from littrainer.arguments.fields_precision import PrecisionFields
from littrainer.arguments.fields_saving import SavingFields
from littrainer.arguments.fields_schedule import ScheduleFields
from littrainer.arguments.fields_script import ScriptFields


# A dataclass takes the fields of its last base first, so the topics stand here from last to first.
#
# In the annotations of optional unions `str` stands second: transformers' HfArgumentParser reads a value from the
# command line as the second member of such a union, and fails on `None` or `list[str]` in the other places.
@dataclass
class ArgumentFields(
    AdditionalFields,
    ScriptFields,
    DistributedFields,
    DataFields,
    EnvironmentFields,
    SavingFields,
    EvaluationFields,
    LoggingFields,
    PrecisionFields,
    OptimizationFields,
    ScheduleFields,
):
    """The fields of TrainingArguments with their defaults and nothing else."""


def topics_of(cls: type) -> list[type]:
    """The classes that hold an argument class's documented fields, one for each topic, in their positional order."""
    topics = list(reversed(ArgumentFields.__bases__)) if issubclass(cls, ArgumentFields) else []
    return [*topics, GenerationFields] if issubclass(cls, GenerationFields) else topics
