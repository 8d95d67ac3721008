"""The model card: README.md of what the Trainer knows. A card that somebody has written or edited is never replaced.

The card notes a digest of itself in a comment, which tells whether it has been edited since.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import json
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.destinations import lightning_precision
from littrainer.arguments.secrets import holds_a_secret
from littrainer.arguments.shown_arguments import as_text
from littrainer.callbacks.log_history import COSTS, EVALUATION, OF_THE_WHOLE_TRAINING, TRAINING, Point, read_history
from littrainer.distributed.layout import data_parallel_size
from littrainer.hub.repository import CARD_NAME, describe_error, redact_tokens
from littrainer.model.facts import base_model
from littrainer.runtime.atomic_files import write_whole
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.version import __version__
from littrainer.strategies.choice import strategy_name

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState

logger = logging.getLogger(__name__)

MARK = "<!-- littrainer wrote this card ({}). Once you have edited it, it is left as it is. -->"
MARK_PATTERN = re.compile(re.escape(MARK).replace(r"\{\}", "([0-9a-f]*)"))
# The block of metadata, as the Hub finds it.
BLOCK = re.compile(r"^\s*---\s*\n(.*?\n)?---[ \t]*(?:\n|$)", re.DOTALL)
# Entries that PEFT writes into the card of an adapter each time that it saves one.
PEFT_ENTRIES = ("library_name", "base_model", "pipeline_tag", "tags")
TAGS = ("generated_from_trainer", "littrainer")
# The name of a repository, with or without its owner, as the Hub accepts it.
REPOSITORY = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]{0,95}")
# Builders of `datasets` for data that is read from files.
READ_FROM_FILES = ("csv", "json", "pandas", "parquet", "text", "arrow", "sql", "imagefolder", "audiofolder")
PLACEHOLDER_TEXT = "More information needed"
PLACEHOLDER_SECTIONS = ("Model description", "Intended uses & limitations", "Training and evaluation data")
LIBRARIES = {
    "Lightning": "lightning",
    "Transformers": "transformers",
    "PyTorch": "torch",
    "Datasets": "datasets",
    "Tokenizers": "tokenizers",
    "PEFT": "peft",
    "DeepSpeed": "deepspeed",
}
# A text, several, or none.
Texts = str | list[str] | None


# ---- Writing, and keeping what somebody has edited -------------------------------------------------------------------


def write_card(
    args: TrainingArguments, state: TrainerState, model: Any, evaluated_on: Any, badges: Iterable[str], given: Any
) -> None:
    """Write the card of a model as README.md into `output_dir`; one that somebody has written or edited is kept.

    Metadata that huggingface_hub refuses are a ValueError.

    Parameters:
        evaluated_on: the dataset that the model was evaluated on.
        badges: links to the runs of trackers.
        given: keywords of `create_model_card`.
    """
    path = Path(args.output_dir) / CARD_NAME
    before = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    has_adapters = hasattr(model, "create_or_update_model_card")
    is_generated = not before.strip() or is_unedited(before)
    if not is_generated and not (has_adapters and _digest(_rewrite_by_peft(model)) == _digest(before)):
        logger.warning("%s is kept as it is, since it has been edited; delete it to have a new model card.", path)
        return
    content = _generate(args, state, model, list_datasets(evaluated_on, given), badges, given)
    # The Hub shows the card to everybody.
    secrets = [getattr(args, field.name, None) for field in dataclasses.fields(args) if holds_a_secret(field.name)]
    content = redact_tokens(content, *secrets)
    content = _complete_by_peft(model, content) if has_adapters else content
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, MARK_PATTERN.sub(MARK.format(_digest(content)), content))


def is_unedited(content: str) -> bool:
    """Return whether a card is as `write_card` wrote it, but for what PEFT rewrites whenever it saves an adapter."""
    mark = MARK_PATTERN.search(content)
    return mark is not None and mark[1] == _digest(content)


def remove_generated_card(folder: Path, repository: str, revision: str | None, token: str | None) -> None:
    """Remove a generated card from a folder that is pushed if the Hub's was edited, or that is not known."""
    path = folder / CARD_NAME
    # A person's card is pushed as it is.
    if not path.is_file() or not is_unedited(path.read_text("utf-8", errors="replace")):
        return
    try:
        there = download_card(repository, revision, token)
        if not there.strip() or is_unedited(there):
            return
        reason = "was edited on the Hub and stays as it is"
    except Exception as error:
        reason = f"may have been edited, and the Hub did not say it ({describe_error(error, token)})"
    path.unlink()
    logger.warning("%s is not pushed: the card of %s %s.", path, repository, reason)


def download_card(repository: str, revision: str | None = None, token: str | None = None) -> str:
    """Return the card that a repository has; empty if it has none, or is not there. No answer is an error."""
    from huggingface_hub import HfApi, errors

    with tempfile.TemporaryDirectory() as folder:
        try:
            # A cached copy would say what was there at an earlier time.
            HfApi().hf_hub_download(repository, CARD_NAME, revision=revision, token=token, local_dir=folder)
        except errors.LocalEntryNotFoundError:
            # This kind of EntryNotFoundError means that there was no answer.
            raise
        except (errors.EntryNotFoundError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            return ""
        return Path(folder, CARD_NAME).read_text("utf-8", errors="replace")


def _digest(content: str) -> str:
    """Return a digest of the metadata, in whatever order, and of the lines of the text without their ends."""
    from huggingface_hub import ModelCard

    entries: dict[str, Any] = {}
    if (block := BLOCK.match(content)) is not None:
        content = content[block.end() :]
        # Reading damaged metadata fails in many ways.
        with suppress(Exception):
            entries = ModelCard(block[0]).data.to_dict()
    if entries.get("library_name") == "peft":
        entries = {name: entry for name, entry in entries.items() if name not in PEFT_ENTRIES}
    lines = [line.rstrip() for line in MARK_PATTERN.sub("", content).strip().splitlines()]
    return hashlib.sha256(json.dumps([entries, lines], sort_keys=True, default=str).encode()).hexdigest()[:16]


def _rewrite_by_peft(model: Any, content: str | None = None) -> str:
    """Return what PEFT makes of a card, or writes if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CARD_NAME)
        if content is not None:
            path.write_text(content, "utf-8", "backslashreplace")
        model.create_or_update_model_card(folder)
        return path.read_text("utf-8")


def _complete_by_peft(model: Any, content: str) -> str:
    """Return the card with what PEFT adds, with the tags that it takes away, and without folders of this machine."""
    from huggingface_hub import ModelCard

    before: Any = ModelCard(content).data
    card = ModelCard(_rewrite_by_peft(model, content))
    data: Any = card.data
    data.tags, data.base_model = _unite(before.tags, data.tags), before.base_model
    return str(card)


# ---- What the card says ----------------------------------------------------------------------------------------------


def _generate(
    args: TrainingArguments,
    state: TrainerState,
    model: Any,
    data: list[dict[str, Any]],
    badges: Iterable[str],
    given: dict[str, Any],
) -> str:
    base = given.get("finetuned_from") or getattr(getattr(base_model(model), "config", None), "_name_or_path", None)
    base = base if isinstance(base, str) and base else None
    repository = None if base is None or os.path.isdir(base) or REPOSITORY.fullmatch(base) is None else base
    name = given.get("model_name") or Path(args.output_dir).absolute().name or "model"
    results = get_last_results(state.log_history)
    started = "was trained from scratch"
    if base is not None:
        folder = _escape(Path(base.replace("\\", "/")).name)
        shown = f"[{_escape(base)}](https://huggingface.co/{base})" if repository else f"`{folder}`"
        started = f"is a fine-tuned version of {shown}, trained"
    kind = args.device.type
    devices = f"{args.world_size} processes, {kind}" if args.world_size > 1 else f"one {kind} device"
    named = " and ".join(f"the {_escape(dataset['dataset_name'])} dataset" for dataset in data)
    sections = [
        f"---\n{_metadata(model, name, repository, data, results, given)}\n---",
        f"# {_escape(name)}",
        MARK.format(""),
        *badges,
        f"This model {started} on {named or 'data without a known name'}.",
        *_section(
            "On the evaluation set it achieves:",
            {format_metric_name(*key): format_number(value) for key, value in results.items()},
        ),
        *(f"## {title}\n\n{PLACEHOLDER_TEXT}" for title in PLACEHOLDER_SECTIONS),
        "## Training procedure",
        *_section("### Training hyperparameters", hyperparameters(args, state)),
        "### How it was trained",
        f"By Lightning: {strategy_name(args)}, {devices}, precision {lightning_precision(args)}.",
        *_table_of_results(state.log_history),
        *_section("### Framework versions", list_framework_versions(), separator=" "),
    ]
    return "\n\n".join(sections) + "\n"


def _metadata(
    model: Any,
    name: str,
    repository: str | None,
    data: list[dict[str, Any]],
    results: dict[tuple[str, str], float],
    given: dict[str, Any],
) -> str:
    """Return the block of metadata; huggingface_hub's refusal is a ValueError."""
    from huggingface_hub import EvalResult, ModelCardData

    library = "transformers" if is_a(base_model(model), "pretrained model") else None
    own_tags = [getattr(part, "model_tags", None) for part in (base_model(model), model)]
    metrics = {tag: (key, value) for key, value in results.items() if (tag := _hub_metric(*key, value))}
    entries: dict[str, Any] = {
        "library_name": "peft" if is_a(model, "peft model") else library,
        "language": _make_list(given.get("language")),
        "license": given.get("license") or (fetch_license(repository) if repository else None),
        "base_model": repository,
        "tags": _unite(given.get("tags"), *own_tags, TAGS),
        "datasets": list(dict.fromkeys(dataset["dataset_type"] for dataset in data if dataset["dataset_type"])),
        "metrics": list(metrics),
    }
    names = _get_transformers_table("TASK_TAG_TO_NAME_MAPPING")
    tasks = [task for task in _make_list(given.get("tasks")) or infer_tasks(model) if task in names]
    try:
        # The Hub refuses a result that lacks its task, its dataset or its metric.
        evaluations = [
            EvalResult(
                task_type=task,
                task_name=names[task],
                metric_type=tag,
                metric_name=format_metric_name(*key),
                metric_value=value,
                **dataset,
            )
            for task in tasks
            for dataset in data
            for tag, (key, value) in metrics.items()
            if dataset["dataset_type"]
        ]
        entries = {name: entry for name, entry in entries.items() if entry}
        return ModelCardData(model_name=name, eval_results=evaluations, **entries).to_yaml()
    except Exception as error:
        # The client checks little beforehand, and fails in many ways.
        raise ValueError(f"the Hub would refuse the metadata of the model card: {error}") from error


def hyperparameters(args: TrainingArguments, state: TrainerState) -> dict[str, str]:
    """Return the values by name of the arguments that a card of transformers has, and weight decay."""
    batch_size = state.train_batch_size or args.train_batch_size
    accumulation, by_tokens = args.gradient_accumulation_steps, args.max_tokens_per_batch
    total = batch_size * data_parallel_size(args) * accumulation
    settings = f", optim_args={as_text(args.optim_args)}" if args.optim_args else ""
    if "adam" in as_text(args.optim).lower():
        settings = f" with betas=({args.adam_beta1}, {args.adam_beta2}), epsilon={args.adam_epsilon}{settings}"
    known = {
        "learning_rate": args.learning_rate,
        "train_batch_size": None if by_tokens else batch_size,
        "eval_batch_size": None if by_tokens else args.eval_batch_size,
        **{name: getattr(args, name) for name in ("max_tokens_per_batch", "pack_to_length")},
        "seed": args.seed,
        "num_devices": args.world_size if args.world_size > 1 else None,
        "gradient_accumulation_steps": accumulation if accumulation > 1 else None,
        "total_train_batch_size": total if total != batch_size and not by_tokens else None,
        "optimizer": f"{as_text(args.optim)}{settings}",
        "lr_scheduler_type": args.lr_scheduler_type,
        "lr_scheduler_warmup_steps": args.warmup_steps or None,
        "training_steps": args.max_steps if args.max_steps > 0 else None,
        "num_epochs": args.num_train_epochs if args.max_steps <= 0 else None,
        "mixed_precision_training": args.mixed_precision if args.mixed_precision in ("bf16", "fp16") else None,
        "label_smoothing_factor": args.label_smoothing_factor or None,
        "weight_decay": args.weight_decay or None,
    }
    return {name: as_text(value) for name, value in known.items() if value is not None}


def list_framework_versions() -> dict[str, str]:
    """Return the libraries that this process has loaded -> their versions."""
    loaded = {name: getattr(sys.modules.get(module), "__version__", None) for name, module in LIBRARIES.items()}
    return {"littrainer": __version__, **{name: str(found) for name, found in loaded.items() if found}}


def get_last_results(log_history: list[Any]) -> dict[tuple[str, str], float]:
    """(metric, evaluation set) -> what the last evaluation found."""
    return {key: points[-1].value for key, points in _evaluations(log_history).items()}


def _evaluations(log_history: list[Any]) -> dict[tuple[str, str], list[Point]]:
    curves = read_history(log_history).curves.items()
    return {key: points for key, points in curves if key[1] != TRAINING and key[0] not in COSTS}


def _table_of_results(log_history: list[Any]) -> list[str]:
    """Return the evaluations during training, a row for each step and a column for each metric and evaluation set."""
    ends = [place for place, entry in enumerate(log_history) if OF_THE_WHOLE_TRAINING in entry]
    during = log_history[: ends[-1]] if ends else log_history
    losses = read_history(during).curves.get(("loss", TRAINING), [])
    evaluated = {key: {point.step: point for point in points} for key, points in _evaluations(during).items()}
    epochs = {step: point.epoch for points in evaluated.values() for step, point in points.items()}
    if not epochs or not (ends or losses):
        return []
    titles = ("Validation Loss" if key == ("loss", EVALUATION) else format_metric_name(*key) for key in evaluated)
    rows = [["Training Loss", "Epoch", "Step", *titles]]
    for step, epoch in sorted(epochs.items()):
        loss = next((format_number(point.value) for point in reversed(losses) if point.step <= step), "No log")
        cells = (format_number(points[step].value) if step in points else "" for points in evaluated.values())
        rows.append([loss, "" if epoch is None else format_number(epoch), str(step), *cells])
    lines = ["| " + " | ".join(_escape(cell).replace("|", r"\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + ":---:|" * len(rows[0]))
    return ["### Training results\n\n" + "\n".join(lines)]


def format_metric_name(metric: str, source: str) -> str:
    """Return what a metric is called on the card: `matthews_correlation` is Matthews Correlation."""
    words = " ".join(word[:1].upper() + word[1:] for word in metric.split("_") if word) or metric
    return words if source == EVALUATION else f"{words} ({source})"


def format_number(value: float) -> str:
    """Return a number with four decimals at most, and a small one with four digits that count."""
    if not math.isfinite(value) or value == int(value):
        return str(float(value))
    return f"{value:.4g}" if abs(value) < 0.001 else f"{value:.4f}"


def _hub_metric(metric: str, source: str, value: float) -> str | None:
    """Return the Hub's name of a metric, if it knows it; of evaluation sets with a name it shows none."""
    name = "rouge" if metric.lower() == "rouge1" else metric.lower()
    is_known = source == EVALUATION and math.isfinite(value) and name in _get_transformers_table("METRIC_TAGS")
    return name if is_known else None


def infer_tasks(model: Any) -> list[str]:
    """Return what the class of a model of transformers does, by transformers' own table."""
    name = type(base_model(model)).__name__
    classes = {
        task: {name for entry in table.values() for name in _make_list(entry)}
        for task, table in _get_transformers_table("TASK_MAPPING").items()
    }
    return [task for task, names in classes.items() if name in names][-1:]


def _get_transformers_table(table: str) -> Any:
    """Return a table of transformers' model cards; empty if transformers is not loaded, or does not have it."""
    modelcard = importlib.import_module("transformers.modelcard") if "transformers" in sys.modules else None
    return getattr(modelcard, table, {})


def fetch_license(repository: str) -> str | None:
    """Return the licence of a repository on the Hub, if it can be asked; a card is written without it otherwise."""
    with suppress(Exception):
        from huggingface_hub import HfApi, constants

        if not constants.HF_HUB_OFFLINE:
            tags = HfApi().model_info(repository, timeout=10.0).tags or []
            return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)
    return None


def list_datasets(dataset: Any, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the datasets that a script names, else what a dataset of the `datasets` library says of itself.

    For each the keywords of an `EvalResult`; `dataset_type` is None if it is no repository's name.
    """
    if isinstance(dataset, Mapping) and not is_a(dataset, "datasets.Dataset"):
        dataset = next(iter(dataset.values()), None)
    found = None
    if is_a(dataset, "datasets.Dataset") or is_a(dataset, "datasets.IterableDataset"):
        found = None if dataset.builder_name in READ_FROM_FILES else dataset.builder_name
    names, tags, arguments = (_make_list(given.get(key)) for key in ("dataset", "dataset_tags", "dataset_args"))
    if not names and not tags and found:
        names = tags = [found]
    shown = []
    for name, tag, argument in itertools.zip_longest(names, tags, arguments[: max(len(names), len(tags))]):
        tag_there = tag if tag is not None and REPOSITORY.fullmatch(tag) else None
        of_dataset = dataset if found and tag_there == found else None
        split, config = getattr(of_dataset, "split", None), getattr(of_dataset, "config_name", None)
        shown.append(
            {
                "dataset_type": tag_there,
                "dataset_name": tag if name is None else name,
                "dataset_config": config,
                "dataset_split": None if split is None else str(split),
                "dataset_args": config if argument is None else argument,
            }
        )
    return shown


def collect_badges(callbacks: Iterable[Any]) -> list[str]:
    """Return what leads readers of the card to the runs of the trackers among callbacks."""
    found: list[str] = []
    for callback in callbacks:
        # A tracker that fails must not prevent the card.
        with suppress(Exception):
            found.extend(filter(None, [getattr(callback, "card_badge", str)()]))
    return found


def _section(title: str, lines: Mapping[str, str], separator: str = ": ") -> list[str]:
    shown = "\n".join(f"- {_escape(name)}{separator}{_escape(value)}" for name, value in lines.items())
    return [f"{title}\n\n{shown}"] if lines else []


def _unite(*several: str | Iterable[str] | None) -> list[str]:
    return list(dict.fromkeys(item for value in several for item in _make_list(value)))


def _make_list(value: str | Iterable[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else [str(item) for item in value or () if item is not None]


def _escape(text: str) -> str:
    """Text from outside as one line without tags of HTML and links."""
    return " ".join(str(text).split()).replace("<", "&lt;").replace(">", "&gt;").replace("](", "]\\(")
