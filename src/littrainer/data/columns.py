"""Dataset columns that the model accepts, and error notes about dropped columns."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from littrainer.arguments.did_you_mean import suggest_name
from littrainer.data.collators import RemoveColumnsCollator, dropped_columns_message, find_text
from littrainer.model.facts import base_model, find_catch_all_name
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.notes import add_note, kind_of

logger = logging.getLogger(__name__)

# Python's messages for missing names, also within a worker's traceback.
MISSING_KEY = re.compile(r"^KeyError: ['\"](.+)['\"]$", re.MULTILINE)
MISSING_ARGUMENTS = re.compile(r"missing \d+ required [\w-]+ arguments?: (.+)")
# Columns that tokenizers and `map` add.
ADDED_COLUMNS = (
    *("attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping"),
    *("length", "id", "idx"),
)
MISSING_ATTRIBUTE = re.compile(r"has no attribute '(\w+)'")


class DroppedColumns(NamedTuple):
    """Columns that `remove_unused_columns` dropped.

    Parameters:
        names: the columns; a collator may add names later.
        model_name: class of the model; None if `signature_columns` names the accepted columns.
        accepted: arguments of forward and label names, or `signature_columns`.
    """

    names: Collection[str]
    description: str | None
    model_name: str | None
    accepted: Sequence[str]


def find_accepted_columns(
    model: Any, label_names: Sequence[str], signature_columns: Sequence[str] | None = None
) -> list[str]:
    if signature_columns is not None:
        return list(signature_columns)
    arguments = inspect.signature(base_model(model).forward).parameters
    return list(dict.fromkeys([*arguments, *label_names, "label", "label_ids"]))


def make_unnamed_batch_error(batch: Any, model: Any, override: str = "compute_loss") -> TypeError:
    kind = "None" if batch is None else kind_of(batch)
    return TypeError(
        f"The batch is {kind}, and {type(model).__name__} is called with its entries as keywords: let "
        f"data_collator return a dict such as {{'input_ids': ..., 'labels': ...}}, or override {override}."
    )


def make_empty_batch_error(dropped_columns: Iterable[DroppedColumns], accepted: list[str], model: Any) -> ValueError:
    removed = {name: None for dropped in dropped_columns for name in dropped.names}
    names = f" ({', '.join(removed)})" if removed else ""
    advice = advise_on_model_kind(model) or "Rename them, or set remove_unused_columns=False"
    return ValueError(
        f"A batch without any input: none of the data's columns{names} is one that {type(model).__name__}.forward "
        f"takes ({', '.join(accepted)}). {advice}."
    )


def read_first_sample(source: Any, evaluates: bool) -> dict[str, Any]:
    """Return a sample with the columns that are dropped later; empty if it cannot be read."""
    data: list[Any] = [getattr(source, name, None) for name in ("train_dataset", "eval_dataset")]
    for dataset in reversed(data) if evaluates else data:
        with suppress(Exception):
            return dict(dataset[0])
    return {}


def suggest_renaming(argument: str, sample: Mapping[str, Any], model: Any) -> str | None:
    # A forward without signature must not replace the error that is being explained.
    with suppress(AttributeError, TypeError, ValueError):
        accepted = find_accepted_columns(model, [])
        unused = [name for name in sample if name not in {*accepted, *ADDED_COLUMNS}]
        unused = [name for name in unused if find_text(sample[name]) is None]
        if unused:
            return (
                f"{type(base_model(model)).__name__}.forward takes {', '.join(accepted)}, and the data has "
                f"{', '.join(sample)}: rename its columns, such as dataset.rename_column({unused[0]!r}, {argument!r})"
            )
    return None


def advise_on_model_kind(model: Any) -> str | None:
    """Return advice on a LightningModule, or on a model of transformers without a head; None for other models."""
    model = base_model(model)
    name = type(model).__name__
    if is_a(model, "lightning module"):
        return f"{name} is a LightningModule: train it with lightning.Trainer, or give the Trainer the model in it"
    arguments = inspect.signature(model.forward).parameters
    if is_a(model, "model of transformers") and name.endswith("Model") and not {"labels", "return_loss"} & {*arguments}:
        return (
            f"{name} has no head, and so no loss: load the class of a task, such as AutoModelForSequenceClassification"
        )
    return None


def drop_extra_columns(dataset: Any, accepted: list[str], model: Any, description: str | None) -> Any:
    """Return the dataset with the accepted columns.

    Parameters:
        model: its forward takes them; None for the columns of `signature_columns`, which a training set must have.
    """
    model_name = None if model is None else type(model).__name__
    dropped = [name for name in dataset.column_names if name not in accepted]
    missing = [name for name in accepted if name not in dataset.column_names] if model is None else []
    if missing and (description == "Training" or len(missing) == len(accepted)):
        raise ValueError(
            f"signature_columns names {missing[0]!r}, and the {str(description).lower()} set has no such column "
            f"({suggest_name(missing[0], dataset.column_names)}); it has {', '.join(dataset.column_names)}. Name the "
            "columns to keep."
        )
    if dropped and len(dropped) == len(dataset.column_names):
        location = f" of the {description.lower()} set" if description else ""
        advice = "Tokenize or rename the columns, or set remove_unused_columns=False to hand them to your data_collator"
        raise ValueError(
            f"No column{location} is an argument of {model_name}.forward: the data has {', '.join(dropped)}, the model "
            f"takes {', '.join(accepted)}. {advise_on_model_kind(model) or advice}."
        )
    if not dropped:
        return dataset
    logger.info(dropped_columns_message(dropped, description, model_name))
    return dataset.remove_columns(dropped)


@contextmanager
def explain_dropped_columns(source: Any) -> Iterator[None]:
    """Add notes about dropped columns to errors of the block."""
    try:
        yield
    except Exception as error:
        loaders = (source.callback_handler.train_dataloader, source.callback_handler.eval_dataloader)
        explain_missing_columns(error, source._dropped_columns.values(), loaders, source.model)
        raise


def explain_missing_columns(
    error: BaseException, dropped_columns: Iterable[DroppedColumns], loaders: Iterable[Any], model: Any
) -> None:
    missing = _find_missing_names(error)
    if not missing:
        return
    for loader in loaders:
        _record_worker_columns(loader)
    for dropped in dropped_columns:
        if missing.intersection(dropped.names):
            add_note(error, _make_note(sorted(missing.intersection(dropped.names)), dropped, model))


def _make_note(missing: list[str], dropped: DroppedColumns, model: Any) -> str:
    catch_all = None
    with suppress(AttributeError, TypeError, ValueError):
        catch_all = None if model is None else find_catch_all_name(model)
    location = f"the {dropped.description.lower()} set" if dropped.description else "the data"
    names = ", ".join(map(repr, missing))
    if dropped.model_name is None:
        return f"signature_columns={list(dropped.accepted)} has left {names} out of {location}: add what is missing."
    arguments = ", ".join(name for name in dropped.accepted if name != catch_all)
    return (
        f"remove_unused_columns has left {names} out of {location}: {dropped.model_name}.forward takes "
        f"{arguments}, and the other columns were dropped ({', '.join(sorted(dropped.names))}). Set "
        f"remove_unused_columns=False to keep them all, or make {names} an argument of forward."
    )


def _find_missing_names(error: BaseException | None) -> set[str]:
    missing: set[str] = set()
    # An error from a generator may be a cause of itself.
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        text = str(error)
        if isinstance(error, KeyError):
            missing.update(argument for argument in error.args[:1] if type(argument) is str)
            # A worker's error has the traceback text as argument.
            text = str(error.args[0]) if error.args else ""
        missing.update(MISSING_KEY.findall(text), MISSING_ATTRIBUTE.findall(text))
        for names in MISSING_ARGUMENTS.findall(text):
            missing.update(re.findall(r"'(\w+)'", names))
        error = error.__cause__ or error.__context__
    return missing


def _record_worker_columns(loader: Any) -> None:
    # Collators in worker processes record dropped columns in copies.
    collate = getattr(loader, "collate_fn", None)
    if isinstance(collate, RemoveColumnsCollator) and not collate.dropped and loader.num_workers:
        with suppress(Exception):
            collate.record_extra_columns(loader.dataset[0])
