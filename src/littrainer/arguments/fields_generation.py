"""Arguments about generating text in evaluation, which only Seq2SeqTrainingArguments has."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from littrainer.arguments.about import about


@runtime_checkable
class GenerationConfig(Protocol):
    """What is read of transformers' class of this name, which may not be there to be imported."""

    def validate(self, strict: bool = False) -> Any:
        """Refuse settings that contradict each other."""

    def to_dict(self) -> dict[str, Any]:
        """The settings by name."""

    def from_model_config(self, model_config: Any) -> Any:
        """Settings that an older model's configuration holds."""


# Without a representation of its own, which would show tokens.
@dataclass(repr=False)
class GenerationFields:
    """Batches of similar length, and what `Seq2SeqTrainer` generates in evaluation (`Seq2SeqTrainingArguments`)."""

    sortish_sampler: bool = field(
        default=False,
        metadata=about("Train on batches of samples of similar length, in random order, which saves padding."),
    )
    predict_with_generate: bool = field(
        default=False,
        metadata=about("Predictions are what the model generates, not its logits; for metrics such as ROUGE."),
    )
    generation_max_length: int | None = field(
        default=None,
        metadata=about("Tokens to generate at most, with the first one; unset leaves it to the generation config."),
    )
    generation_num_beams: int | None = field(
        default=None,
        metadata=about("Beams to search with, 1 for no beam search; unset leaves it to the generation config."),
    )
    generation_config: str | Path | GenerationConfig | None = field(
        default=None,
        metadata=about("Generation config of the model: an object, a file, a folder that holds one, or a model id."),
    )
