"""What a model card is about: the model it began with, its task, its data, its licence and its tags."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.errors.lazy_isinstance import is_a
from littrainer.model.facts import base_model

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

# What the Hub takes for the name of a repository, with or without its owner.
REPOSITORY = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]{0,95}")
GENERATED_TAG = "generated_from_trainer"
OWN_TAG = "littrainer"
# Task on the Hub -> transformers' tables of the classes that are made for it; of several tasks the last counts.
CLASS_TABLES: dict[str, tuple[str, ...]] = {
    "text-generation": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "image-classification": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",),
    "image-segmentation": ("MODEL_FOR_IMAGE_SEGMENTATION_MAPPING_NAMES",),
    "fill-mask": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    "object-detection": ("MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",),
    "question-answering": ("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",),
    "text2text-generation": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
    "text-classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",),
    "table-question-answering": ("MODEL_FOR_TABLE_QUESTION_ANSWERING_MAPPING_NAMES",),
    "token-classification": ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",),
    "audio-classification": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",),
    "automatic-speech-recognition": ("MODEL_FOR_CTC_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    "zero-shot-image-classification": ("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",),
    "image-text-to-text": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
}
# What `datasets` calls data that it has read from files, which are no dataset of the Hub.
READ_FROM_FILES = frozenset(
    {
        *("csv", "json", "pandas", "parquet", "text", "arrow", "sql", "spark", "xml", "webdataset", "generator"),
        *("imagefolder", "audiofolder", "videofolder", "pdffolder", "niftifolder", "hdf5", "lance", "cache"),
    }
)
LICENSE_TAG = "license:"
SECONDS_FOR_THE_LICENSE = 10.0
# One text or several, or none that is given.
Texts = str | list[str] | None


@dataclass(frozen=True)
class Given:
    """What a script says about its model; what it leaves out is found, as far as it can be.

    Parameters:
        language, license, tags, tasks: entries of the metadata.
        model_name: title of the card.
        finetuned_from: the model it began with.
        dataset: names of the datasets for readers.
        dataset_tags: their names on the Hub.
        dataset_args: the configuration of each.
    """

    language: Texts = None
    license: str | None = None
    tags: Texts = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: Texts = None
    dataset_tags: Texts = None
    dataset: Texts = None
    dataset_args: Texts = None


@dataclass(frozen=True)
class Data:
    """One dataset, by its name for readers, its name on the Hub, configuration and split; each None where unknown."""

    name: str
    repository: str | None = None
    config: str | None = None
    split: str | None = None
    arguments: str | None = None


@dataclass(frozen=True)
class Subject:
    """What a card is about.

    Parameters:
        name: the card's title.
        started_from: what the model was before, for readers; None for a model that was new.
        base_model: the same as a repository's name; None where it is none.
        library: which library loads the model.
        tasks: the Hub's names of what it does.
        data: the datasets.
    """

    name: str
    started_from: str | None
    base_model: str | None
    library: str | None
    tasks: tuple[str, ...]
    data: tuple[Data, ...]
    languages: tuple[str, ...]
    license: str | None
    tags: tuple[str, ...]


def subject_of(trainer: Trainer, given: Given) -> Subject:
    """Put together what a script says and what can be seen of its model and data."""
    base = given.finetuned_from or _name_in_config(trainer.model)
    is_local = base is not None and (
        base == trainer._model_folder or os.path.isdir(base) or REPOSITORY.fullmatch(base) is None
    )
    started_from = Path(base.replace("\\", "/")).name if base is not None and is_local else base
    repository = None if is_local else base
    name = given.model_name or Path(trainer.args.output_dir).absolute().name or started_from or "model"
    return Subject(
        name=_one_line(name),
        started_from=None if started_from is None else _one_line(started_from),
        base_model=repository,
        library=_library_of(trainer.model),
        tasks=as_tuple(given.tasks) or _tasks_of(trainer.model),
        data=_data_of(trainer, given),
        languages=as_tuple(given.language),
        license=given.license or (license_of(repository) if repository else None),
        tags=tags_of(trainer.model, given.tags),
    )


def folder_of(model: Any) -> str | None:
    """The folder that a model was loaded from, as its configuration names it; None where that is no folder here.

    A relative name says so only as long as the program works in the same folder.
    """
    name = _name_in_config(model)
    return name if name is not None and os.path.isdir(name) else None


def as_tuple(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """One text or several as a tuple, without None."""
    values = (value,) if isinstance(value, str) else value or ()
    return tuple(str(item) for item in values if item is not None)


def tags_of(model: Any, given: str | Iterable[str] | None = None) -> tuple[str, ...]:
    """Tags of a model's card: those given, the model's own (trackers add theirs there), and how it was made."""
    own = as_tuple(getattr(base_model(model), "model_tags", None)) + as_tuple(getattr(model, "model_tags", None))
    return tuple(dict.fromkeys((*as_tuple(given), *own, GENERATED_TAG, OWN_TAG)))


def license_of(repository: str) -> str | None:
    """The licence of a repository on the Hub, if it can be asked; a card is written without it otherwise."""
    with suppress(Exception):
        from huggingface_hub import HfApi, constants

        if not constants.HF_HUB_OFFLINE:
            tags = HfApi().model_info(repository, timeout=SECONDS_FOR_THE_LICENSE).tags or []
            return next((tag.removeprefix(LICENSE_TAG) for tag in tags if tag.startswith(LICENSE_TAG)), None)
    return None


def _name_in_config(model: Any) -> str | None:
    config = getattr(base_model(model), "config", None)
    name = getattr(config, "_name_or_path", None)
    return name if isinstance(name, str) and name else None


def _library_of(model: Any) -> str | None:
    if is_a(model, "peft model"):
        return "peft"
    return "transformers" if is_a(base_model(model), "pretrained model") else None


def _tasks_of(model: Any) -> tuple[str, ...]:
    # A model that one of the tables lists can only be there if transformers is.
    if "transformers" not in sys.modules:
        return ()
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    name = type(base_model(model)).__name__
    found = [
        task
        for task, names in CLASS_TABLES.items()
        if any(name in _classes_in(getattr(tables, table, {})) for table in names)
    ]
    return tuple(found[-1:])


def _classes_in(table: Mapping[str, Any]) -> set[str]:
    classes: set[str] = set()
    for entry in table.values():
        classes.update([entry] if isinstance(entry, str) else entry)
    return classes


def _data_of(trainer: Trainer, given: Given) -> tuple[Data, ...]:
    names, repositories = as_tuple(given.dataset), as_tuple(given.dataset_tags)
    if not names and not repositories:
        return _data_of_itself(trainer)
    own = _data_of_itself(trainer)
    arguments = [given.dataset_args] if isinstance(given.dataset_args, str) else list(given.dataset_args or ())
    found = []
    for place in range(max(len(names), len(repositories))):
        name = names[place] if place < len(names) else None
        repository = repositories[place] if place < len(repositories) else None
        itself = next((data for data in own if data.repository == repository), None) if repository else None
        found.append(
            Data(
                name=_one_line(name or repository or ""),
                repository=repository if repository and REPOSITORY.fullmatch(repository) else None,
                config=itself.config if itself else None,
                split=itself.split if itself else None,
                arguments=arguments[place] if place < len(arguments) else (itself.arguments if itself else None),
            )
        )
    return tuple(found)


def _data_of_itself(trainer: Trainer) -> tuple[Data, ...]:
    """What a dataset of the `datasets` library says about itself; the one that was evaluated on comes first."""
    dataset = trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset
    if isinstance(dataset, Mapping) and not is_a(dataset, "datasets.Dataset"):
        dataset = next(iter(dataset.values()), None)
    if not (is_a(dataset, "datasets.Dataset") or is_a(dataset, "datasets.IterableDataset")):
        return ()
    name = dataset.builder_name
    if not name or name in READ_FROM_FILES:
        return ()
    split = None if dataset.split is None else str(dataset.split)
    repository = name if REPOSITORY.fullmatch(name) else None
    return (Data(_one_line(name), repository, dataset.config_name, split, dataset.config_name),)


def _one_line(text: str) -> str:
    return " ".join(str(text).split())
