"""The block of metadata at the head of a model card, as the Hub reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from littrainer.hub.card.block import Card
from littrainer.hub.card.results import Results, metric_tags
from littrainer.hub.card.subject import Given, Subject

# Task on the Hub -> what results are listed under; results of other tasks are not listed.
TASK_NAMES: dict[str, str] = {
    "fill-mask": "Masked Language Modeling",
    "image-classification": "Image Classification",
    "image-segmentation": "Image Segmentation",
    "multiple-choice": "Multiple Choice",
    "object-detection": "Object Detection",
    "question-answering": "Question Answering",
    "table-question-answering": "Table Question Answering",
    "text-classification": "Text Classification",
    "text-generation": "Causal Language Modeling",
    "text2text-generation": "Sequence-to-sequence Language Modeling",
    "token-classification": "Token Classification",
    "translation": "Translation",
    "summarization": "Summarization",
    "zero-shot-classification": "Zero Shot Classification",
    "automatic-speech-recognition": "Automatic Speech Recognition",
    "audio-classification": "Audio Classification",
}
# What training decides anew, whatever a person has written there.
RESULTS = ("metrics", "model-index")
# What PEFT writes into the card of an adapter each time that it saves one.
PEFT_ENTRIES = frozenset({"library_name", "base_model", "pipeline_tag"})
# Keyword of a call -> the entry that it decides.
ENTRY_OF_KEYWORD: dict[str, str] = {
    "language": "language",
    "license": "license",
    "finetuned_from": "base_model",
    "dataset_tags": "datasets",
}


def metadata_of(subject: Subject, results: Results) -> dict[str, Any]:
    """The entries of a new card."""
    found = metric_tags(results)
    datasets = [data.repository for data in subject.data if data.repository]
    entries: dict[str, Any] = {
        "library_name": subject.library,
        "language": list(subject.languages),
        "license": subject.license,
        "base_model": subject.base_model,
        "tags": list(subject.tags),
        "datasets": list(dict.fromkeys(datasets)),
        "metrics": list(found),
        "model-index": [{"name": subject.name, "results": _results(subject, found)}],
    }
    return {name: entry for name, entry in entries.items() if entry}


def _results(subject: Subject, found: dict[str, tuple[str, float]]) -> list[dict[str, Any]]:
    # The Hub refuses a card with a result that lacks its task, its dataset or its metrics.
    return [
        {
            "task": {"name": TASK_NAMES[task], "type": task},
            "dataset": {
                name: text
                for name, text in (
                    *(("name", data.name), ("type", data.repository), ("config", data.config)),
                    *(("split", data.split), ("args", data.arguments)),
                )
                if text
            },
            "metrics": [{"name": name, "type": tag, "value": value} for tag, (name, value) in found.items()],
        }
        for task in subject.tasks
        if task in TASK_NAMES
        for data in subject.data
        if data.repository and found
    ]


def own_entries(card: Card, is_of_peft: bool) -> dict[str, Any]:
    """Entries of a card that a person has written, and not PEFT.

    Parameters:
        is_of_peft: the model is an adapter.
    """
    return {
        name: entry
        for name, entry in card.entries_of_a_person().items()
        if name not in RESULTS and not (is_of_peft and name in PEFT_ENTRIES)
    }


def joined(
    new: dict[str, Any], of_a_person: dict[str, Any], given: Given, taken_out: Iterable[str] = ()
) -> dict[str, Any]:
    """New entries and those that a person has written, which win unless the script or training decides them.

    Tags are joined.

    Parameters:
        taken_out: entries that a person has deleted.
    """
    decided = {entry for keyword, entry in ENTRY_OF_KEYWORD.items() if getattr(given, keyword)} & new.keys()
    stay_out = {*taken_out} - decided - {*RESULTS, "tags"}
    kept = {name: entry for name, entry in of_a_person.items() if name not in decided and name not in RESULTS}
    entries = {**{name: entry for name, entry in new.items() if name not in stay_out}, **kept}
    tags = of_a_person.get("tags")
    if tags:
        own = [tags] if isinstance(tags, str) else tags
        entries["tags"] = list(dict.fromkeys([*new.get("tags", []), *map(str, own)]))
    return entries


def check_metadata(metadata: dict[str, Any]) -> None:
    """Let huggingface_hub read the metadata, where it is installed.

    Raises:
        ValueError: it finds that they are no metadata of a model.
    """
    try:
        from huggingface_hub import ModelCardData
    except ImportError:
        return
    try:
        ModelCardData(**metadata)
    except Exception as error:
        # It checks little beforehand, and fails in many ways.
        raise ValueError(f"the Hub would refuse the metadata of the model card: {error}") from error
