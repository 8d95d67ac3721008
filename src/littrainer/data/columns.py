"""The columns of a dataset that the model takes, and notes on errors that miss the others."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from littrainer.data.collators import RemoveColumnsCollator, dropped_columns_message, find_text
from littrainer.model.facts import base_model, find_catch_all_name
from littrainer.runtime.notes import add_note, kind_of

logger = logging.getLogger(__name__)

# Messages of Python for a missing name; also in the text of an error from a loader's worker process.
MISSING_KEY = re.compile(r"^KeyError: ['\"](.+)['\"]$", re.MULTILINE)
MISSING_ARGUMENTS = re.compile(r"missing \d+ required [\w-]+ arguments?: (.+)")
# Columns that tokenizers and maps add to a sample.
ADDED_COLUMNS = (
    *("attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping"),
    *("length", "id", "idx"),
)
MISSING_ATTRIBUTE = re.compile(r"has no attribute '(\w+)'")


class DroppedColumns(NamedTuple):
    """The columns that `remove_unused_columns` has left out of a dataset.

    Parameters:
        names: the columns; the collator that drops them may add some later.
        description: the dataset, such as "Training".
        model_name: class of the model.
        accepted: the names that are kept: the arguments of forward and the names of labels.
    """

    names: Collection[str]
    description: str | None
    model_name: str
    accepted: Sequence[str]


def find_accepted_columns(model: Any, label_names: Sequence[str]) -> list[str]:
    """Return the columns that are kept: the arguments of the (unwrapped) model's forward, and names of labels."""
    arguments = inspect.signature(base_model(model).forward).parameters
    return list(dict.fromkeys([*arguments, *label_names, "label", "label_ids"]))


def make_unnamed_batch_error(batch: Any, model: Any, override: str = "compute_loss") -> TypeError:
    """Return the error for a batch that is no mapping, so that only an overridden method can call the model."""
    given = "None" if batch is None else kind_of(batch)
    return TypeError(
        f"The batch is {given}, and {type(model).__name__} is called with its entries as keywords: let "
        f"data_collator return a dict such as {{'input_ids': ..., 'labels': ...}}, or override {override}."
    )


def read_first_sample(source: Any, evaluates: bool) -> dict[str, Any]:
    """Return the first sample of a Trainer's data, with columns that are dropped; empty if it cannot be read."""
    data: list[Any] = [getattr(source, name, None) for name in ("train_dataset", "eval_dataset")]
    for dataset in reversed(data) if evaluates else data:
        with suppress(Exception):
            return dict(dataset[0])
    return {}


def suggest_renaming(wanted: str, sample: Mapping[str, Any], model: Any) -> str | None:
    """Return half a sentence for data that has an argument of forward under another name; else None."""
    # A forward may be a callable without a signature, and the first error is to be raised.
    with suppress(AttributeError, TypeError, ValueError):
        accepted = find_accepted_columns(model, [])
        known = {*accepted, *ADDED_COLUMNS}
        others = [name for name, value in sample.items() if name not in known and find_text(value) is None]
        if others:
            return (
                f"{type(base_model(model)).__name__}.forward takes {', '.join(accepted)}, and the data has "
                f"{', '.join(sample)}: rename its columns, such as dataset.rename_column({others[0]!r}, {wanted!r})"
            )
    return None


def drop_extra_columns(dataset: Any, accepted: list[str], model_name: str, description: str | None) -> Any:
    """Return a `datasets.Dataset` without columns that forward does not take; raise a ValueError if none is left."""
    dropped = [name for name in dataset.column_names if name not in accepted]
    if dropped and len(dropped) == len(dataset.column_names):
        where = f" of the {description.lower()} set" if description else ""
        raise ValueError(
            f"No column{where} is an argument of {model_name}.forward: the data has {', '.join(dropped)}, the model "
            f"takes {', '.join(accepted)}. Tokenize or rename the columns, or set remove_unused_columns=False to hand "
            "them to your data_collator."
        )
    if not dropped:
        return dataset
    logger.info(dropped_columns_message(dropped, description, model_name))
    return dataset.remove_columns(dropped)


@contextmanager
def explain_dropped_columns(source: Any) -> Iterator[None]:
    """A block of work with a Trainer's data, in which an error that misses a dropped column gets a note."""
    try:
        yield
    except Exception as error:
        loaders = (source.callback_handler.train_dataloader, source.callback_handler.eval_dataloader)
        explain_missing_columns(error, source._dropped_columns.values(), loaders, source.model)
        raise


def explain_missing_columns(
    error: BaseException, left_out: Iterable[DroppedColumns], loaders: Iterable[Any], model: Any
) -> None:
    """Add a note to an error that misses a column which datasets or the collators of loaders have dropped."""
    missing = _missing_names(error)
    if not missing:
        return
    for loader in loaders:
        _look_for_columns(loader)
    for dropped in left_out:
        if missing.intersection(dropped.names):
            add_note(error, _explanation(sorted(missing.intersection(dropped.names)), dropped, model))


def _explanation(missing: list[str], dropped: DroppedColumns, model: Any) -> str:
    catch_all = None
    # A forward may be a callable without a signature, and the first error is to be raised.
    with suppress(AttributeError, TypeError, ValueError):
        # The name of further keywords is no argument.
        catch_all = None if model is None else find_catch_all_name(model)
    where = f"the {dropped.description.lower()} set" if dropped.description else "the data"
    names = ", ".join(map(repr, missing))
    arguments = ", ".join(name for name in dropped.accepted if name != catch_all)
    return (
        f"remove_unused_columns has left {names} out of {where}: {dropped.model_name}.forward takes "
        f"{arguments}, and the other columns were dropped ({', '.join(sorted(dropped.names))}). Set "
        f"remove_unused_columns=False to keep them all, or make {names} an argument of forward."
    )


def _missing_names(error: BaseException | None) -> set[str]:
    missing: set[str] = set()
    # An error from a generator may be among its own causes.
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error)
        if isinstance(error, KeyError):
            missing.update(argument for argument in error.args[:1] if type(argument) is str)
            # A worker's error has its whole traceback as argument.
            text = str(error.args[0]) if error.args else ""
        missing.update(MISSING_KEY.findall(text), MISSING_ATTRIBUTE.findall(text))
        for names in MISSING_ARGUMENTS.findall(text):
            missing.update(re.findall(r"'(\w+)'", names))
        error = error.__cause__ or error.__context__
    return missing


def _look_for_columns(loader: Any) -> None:
    # A collator in a worker process drops columns of which its copy here has no record.
    collate = getattr(loader, "collate_fn", None)
    if isinstance(collate, RemoveColumnsCollator) and not collate.dropped and loader.num_workers:
        with suppress(Exception):
            collate.note_extra_columns(loader.dataset[0])
