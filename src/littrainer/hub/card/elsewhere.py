"""Cards that transformers, PEFT and huggingface_hub generate, and whether a person has written into one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

GENERATED_BY_TRANSFORMERS = "has been generated automatically according to the information the Trainer had access to"
# What stands in each section of its cards that is left to the user.
LEFT_TO_THE_USER = "More information needed"
# Entries that its Trainer generates from what ours knows as well; the others may be a person's.
FOUND_ANEW = frozenset({"library_name", "base_model", "datasets", "metrics", "model-index"})
# The card that PEFT and huggingface_hub begin with.
TEMPLATE_TITLE = "# Model Card for Model ID"
LEFT_IN_THE_TEMPLATE = "[More Information Needed]"
FEWEST_LEFT_IN_THE_TEMPLATE = 10
PLACEHOLDER = re.compile(r'\{\{\s*\w+\s*\|\s*default\("(.*?)",\s*true\)\s*\}\}')
# What transformers' models have there when they are pushed by themselves.
DESCRIPTION_OF_TRANSFORMERS = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. "
    "This model card has been automatically generated."
)

_NUMBER = r"(?:-?[\d.]+(?:e[+-]?\d+)?|nan|-?inf|None|True|False|np\.\w+\(.*\)|\{.*\}|\[.*\])"
_HYPERPARAMETERS = "|".join(
    (
        *("learning_rate", "train_batch_size", "eval_batch_size", "seed", "distributed_type", "num_devices"),
        *("gradient_accumulation_steps", "total_train_batch_size", "total_eval_batch_size", "optimizer"),
        *("lr_scheduler_type", "lr_scheduler_warmup_ratio", "lr_scheduler_warmup_steps", "training_steps"),
        *("num_epochs", "mixed_precision_training", "label_smoothing_factor"),
    )
)
_LIBRARIES = "PEFT|Transformers|Pytorch|PyTorch|Tensorflow|Datasets|Tokenizers"
_LEFT = re.escape(LEFT_TO_THE_USER)
# What PEFT adds under "Training procedure".
_QUANTIZATION = (
    r"(?:The following `bitsandbytes` quantization config was used during training:\n(?:- \w+: .*\n)*"
    r"(?:The following hyperparameters were used during training:\n)?)?"
)
# A whole card of transformers' Trainer, without empty lines and what surrounds each line.
OF_TRANSFORMERS = re.compile(
    rf"<!-- This model card {GENERATED_BY_TRANSFORMERS}\. You\n"
    r"should probably proofread and complete it, then remove this comment\. -->\n"
    r"(?:(?:<a href=[^>]*><img [^>]*></a>|\[<img [^>]*>\]\([^)]*\))\n)*"
    r"# (?P<title>.+)\n"
    r"This model (?:was trained from scratch|is a fine-tuned version of \[.*?\]\(https://huggingface\.co/[^)\n]*\))"
    r" on (?:(?!\. ).)+ datasets?\.\n"
    rf"(?:It achieves the following results on the evaluation set:\n(?:- [^:\n]+: {_NUMBER}\n)*)?"
    + "".join(
        rf"## {title}\n{_LEFT}\n"
        for title in ("Model description", "Intended uses & limitations", "Training and evaluation data")
    )
    + rf"## Training procedure\n{_QUANTIZATION}### Training hyperparameters\n"
    rf"(?:{_LEFT}\n|The following hyperparameters were used during training:\n"
    rf"(?:- optimizer: .* and the args are:\n.*\n|- (?:{_HYPERPARAMETERS}): .*\n)*)"
    r"(?:### Training results\n(?:\|.*\|\n)*)?"
    rf"### Framework versions\n(?:- (?:{_LIBRARIES}) \S+\n)*"
)
# What PEFT adds to the template.
BY_PEFT = re.compile(rf"(?:## Training procedure\n{_QUANTIZATION})?(?:### Framework versions\n(?:- PEFT \S+\n)*)?\Z")


def is_as_generated(text: str, metadata: Mapping[str, Any]) -> bool:
    """Whether every line of a card's text is one that another library generates; in doubt it is a person's."""
    lines = _without_empty_lines(text)
    if GENERATED_BY_TRANSFORMERS in text:
        found = OF_TRANSFORMERS.fullmatch(lines)
        return found is not None and found["title"] == _title_in(metadata, found["title"].strip())
    if TEMPLATE_TITLE not in text or lines.count(LEFT_IN_THE_TEMPLATE) < FEWEST_LEFT_IN_THE_TEMPLATE:
        return False
    return set(BY_PEFT.sub("", lines, count=1).splitlines()) <= lines_of_the_template()


@cache
def lines_of_the_template() -> frozenset[str]:
    """Lines of the template of huggingface_hub with nothing filled in; none where it cannot be read."""
    try:
        from huggingface_hub import ModelCard

        template = Path(ModelCard.default_template_path).read_text(encoding="utf-8")
    except (ImportError, AttributeError, OSError):
        return frozenset()
    lines = _without_empty_lines(PLACEHOLDER.sub(lambda place: place[1], template)).splitlines()
    return frozenset((*lines, DESCRIPTION_OF_TRANSFORMERS))


def _without_empty_lines(text: str) -> str:
    return "".join(f"{line.strip()}\n" for line in text.splitlines() if line.strip())


def _title_in(metadata: Mapping[str, Any], otherwise: str) -> Any:
    """The title that transformers notes beside the results as well."""
    results = metadata.get("model-index")
    first = results[0] if isinstance(results, list) and results else None
    return first.get("name", otherwise) if isinstance(first, dict) else otherwise
