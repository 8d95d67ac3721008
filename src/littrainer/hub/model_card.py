"""The model card: README.md from the Trainer's data. A card that was written or edited by hand is never replaced.

A comment with a digest of the card shows whether it has been edited.
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

from littrainer.arguments.destinations import get_lightning_precision
from littrainer.arguments.secrets import is_secret_name
from littrainer.arguments.shown_arguments import format_value
from littrainer.callbacks.log_history import (
    COSTS,
    END_OF_TRAINING_METRIC,
    EVALUATION,
    TRAINING,
    Point,
    parse_log_history,
)
from littrainer.distributed.layout import data_parallel_size
from littrainer.hub.repository import CARD_NAME, describe_error, redact_tokens
from littrainer.model.facts import base_model
from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.version import __version__
from littrainer.strategies.choice import strategy_name

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState

logger = logging.getLogger(__name__)

MARK = "<!-- littrainer wrote this card ({}). Once you have edited it, it is left as it is. -->"
MARK_PATTERN = re.compile(re.escape(MARK).replace(r"\{\}", "([0-9a-f]*)"))
# The block of metadata, as parsed by the Hub.
BLOCK = re.compile(r"^\s*---\s*\n(.*?\n)?---[ \t]*(?:\n|$)", re.DOTALL)
# PEFT writes these at each save of an adapter.
PEFT_ENTRIES = ("library_name", "base_model", "pipeline_tag", "tags")
TAGS = ("generated_from_trainer", "littrainer")
# With or without owner.
REPOSITORY = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]{0,95}")
# Builders of `datasets`, which are no names of datasets.
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
Texts = str | list[str] | None


# ---- Writing the card, unless it was edited --------------------------------------------------------------------------


def write_card(
    args: TrainingArguments, state: TrainerState, model: Any, dataset: Any, badges: Iterable[str], keywords: Any
) -> None:
    """Write the card of a model to README.md in `output_dir`, unless that was written or edited by hand.

    Parameters:
        dataset: the evaluation dataset.
        badges: links to the runs of trackers.
        keywords: as of `create_model_card`.
    """
    path = Path(args.output_dir) / CARD_NAME
    previous = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    has_adapters = hasattr(model, "create_or_update_model_card")
    is_generated = not previous.strip() or is_unedited(previous)
    if not is_generated and not (has_adapters and _digest(_rewrite_by_peft(model)) == _digest(previous)):
        logger.warning("%s is kept as it is, since it has been edited; delete it to have a new model card.", path)
        return
    content = _generate(args, state, model, list_datasets(dataset, keywords), badges, keywords)
    # The card is public.
    secrets = [getattr(args, field.name, None) for field in dataclasses.fields(args) if is_secret_name(field.name)]
    content = redact_tokens(content, *secrets)
    content = _complete_by_peft(model, content) if has_adapters else content
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, MARK_PATTERN.sub(MARK.format(_digest(content)), content))


def is_unedited(content: str) -> bool:
    """Return whether a card has not been edited since `write_card`, except by PEFT."""
    mark = MARK_PATTERN.search(content)
    return mark is not None and mark[1] == _digest(content)


def remove_generated_card(folder: Path, repository: str, revision: str | None, token: str | None) -> None:
    """Remove a generated card from a folder to push, if the Hub's card was edited or cannot be read."""
    path = folder / CARD_NAME
    if not path.is_file() or not is_unedited(path.read_text("utf-8", errors="replace")):
        return
    try:
        remote_card = download_card(repository, revision, token)
        if not remote_card.strip() or is_unedited(remote_card):
            return
        reason = "was edited on the Hub and stays as it is"
    except Exception as error:
        reason = f"may have been edited, and the Hub did not say it ({describe_error(error, token)})"
    path.unlink()
    logger.warning("%s is not pushed: the card of %s %s.", path, repository, reason)


def download_card(repository: str, revision: str | None = None, token: str | None = None) -> str:
    """Return the card of a repository; empty if there is no card, repository or branch."""
    from huggingface_hub import HfApi, errors

    with tempfile.TemporaryDirectory() as folder:
        try:
            # A cached copy may be outdated.
            HfApi().hf_hub_download(repository, CARD_NAME, revision=revision, token=token, local_dir=folder)
        except errors.LocalEntryNotFoundError:
            # A subclass of EntryNotFoundError, raised if the Hub was not reached.
            raise
        except (errors.EntryNotFoundError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            return ""
        return Path(folder, CARD_NAME).read_text("utf-8", errors="replace")


def _digest(content: str) -> str:
    """Return a digest of the metadata, in any order, and of the text without trailing white space."""
    from huggingface_hub import ModelCard

    entries: dict[str, Any] = {}
    if (block := BLOCK.match(content)) is not None:
        content = content[block.end() :]
        # Damaged metadata raise many kinds of errors.
        with suppress(Exception):
            entries = ModelCard(block[0]).data.to_dict()
    if entries.get("library_name") == "peft":
        entries = {name: entry for name, entry in entries.items() if name not in PEFT_ENTRIES}
    lines = [line.rstrip() for line in MARK_PATTERN.sub("", content).strip().splitlines()]
    return hashlib.sha256(json.dumps([entries, lines], sort_keys=True, default=str).encode()).hexdigest()[:16]


def _rewrite_by_peft(model: Any, content: str | None = None) -> str:
    """Return a card as rewritten by PEFT, or PEFT's new card."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CARD_NAME)
        if content is not None:
            path.write_text(content, "utf-8", "backslashreplace")
        model.create_or_update_model_card(folder)
        return path.read_text("utf-8")


def _complete_by_peft(model: Any, content: str) -> str:
    """Add PEFT's entries to a card, without losing tags, and without local folders."""
    from huggingface_hub import ModelCard

    original: Any = ModelCard(content).data
    card = ModelCard(_rewrite_by_peft(model, content))
    data: Any = card.data
    data.tags = _unite(original.tags, data.tags)
    data.base_model = original.base_model
    return str(card)


# ---- The content of the card -----------------------------------------------------------------------------------------


def _generate(
    args: TrainingArguments,
    state: TrainerState,
    model: Any,
    data: list[dict[str, Any]],
    badges: Iterable[str],
    keywords: dict[str, Any],
) -> str:
    base = keywords.get("finetuned_from") or getattr(getattr(base_model(model), "config", None), "_name_or_path", None)
    base = base if isinstance(base, str) and base else None
    repository = None if base is None or os.path.isdir(base) or REPOSITORY.fullmatch(base) is None else base
    name = keywords.get("model_name") or Path(args.output_dir).absolute().name or "model"
    results = get_last_results(state.log_history)
    started = "was trained from scratch"
    if base is not None:
        folder = _escape(Path(base.replace("\\", "/")).name)
        shown = f"[{_escape(base)}](https://huggingface.co/{base})" if repository else f"`{folder}`"
        started = f"is a fine-tuned version of {shown}, trained"
    kind = args.device.type
    devices = f"{args.world_size} processes, {kind}" if args.world_size > 1 else f"one {kind} device"
    dataset_names = " and ".join(f"the {_escape(dataset['dataset_name'])} dataset" for dataset in data)
    sections = [
        f"---\n{_metadata(model, name, repository, data, results, keywords)}\n---",
        f"# {_escape(name)}",
        MARK.format(""),
        *badges,
        f"This model {started} on {dataset_names or 'data without a known name'}.",
        *_section(
            "On the evaluation set it achieves:",
            {format_metric_name(*key): format_number(value) for key, value in results.items()},
        ),
        *(f"## {title}\n\n{PLACEHOLDER_TEXT}" for title in PLACEHOLDER_SECTIONS),
        "## Training procedure",
        *_section("### Training hyperparameters", list_hyperparameters(args, state)),
        "### How it was trained",
        f"By Lightning: {strategy_name(args)}, {devices}, precision {get_lightning_precision(args)}.",
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
    keywords: dict[str, Any],
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    library = "transformers" if is_a(base_model(model), "pretrained model") else None
    model_tags = [getattr(part, "model_tags", None) for part in (base_model(model), model)]
    metrics = {tag: (key, value) for key, value in results.items() if (tag := _hub_metric(*key, value))}
    entries: dict[str, Any] = {
        "library_name": "peft" if is_a(model, "peft model") else library,
        "language": _make_list(keywords.get("language")),
        "license": keywords.get("license") or (fetch_license(repository) if repository else None),
        "base_model": repository,
        "tags": _unite(keywords.get("tags"), *model_tags, TAGS),
        "datasets": list(dict.fromkeys(dataset["dataset_type"] for dataset in data if dataset["dataset_type"])),
        "metrics": list(metrics),
    }
    names = _get_transformers_table("TASK_TAG_TO_NAME_MAPPING")
    tasks = [task for task in _make_list(keywords.get("tasks")) or infer_tasks(model) if task in names]
    try:
        # The Hub refuses a result without task, dataset or metric.
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
        # The client raises many kinds of errors.
        raise ValueError(f"the Hub would refuse the metadata of the model card: {error}") from error


def list_hyperparameters(args: TrainingArguments, state: TrainerState) -> dict[str, str]:
    """Return the arguments of transformers' card, and weight decay, by name."""
    batch_size = state.train_batch_size or args.train_batch_size
    accumulation, by_tokens = args.gradient_accumulation_steps, args.max_tokens_per_batch
    total = batch_size * data_parallel_size(args) * accumulation
    settings = f", optim_args={format_value(args.optim_args)}" if args.optim_args else ""
    if "adam" in format_value(args.optim).lower():
        settings = f" with betas=({args.adam_beta1}, {args.adam_beta2}), epsilon={args.adam_epsilon}{settings}"
    values = {
        "learning_rate": args.learning_rate,
        "train_batch_size": None if by_tokens else batch_size,
        "eval_batch_size": None if by_tokens else args.eval_batch_size,
        **{name: getattr(args, name) for name in ("max_tokens_per_batch", "pack_to_length")},
        "seed": args.seed,
        "num_devices": args.world_size if args.world_size > 1 else None,
        "gradient_accumulation_steps": accumulation if accumulation > 1 else None,
        "total_train_batch_size": total if total != batch_size and not by_tokens else None,
        "optimizer": f"{format_value(args.optim)}{settings}",
        "lr_scheduler_type": args.lr_scheduler_type,
        "lr_scheduler_warmup_steps": args.warmup_steps or None,
        "training_steps": args.max_steps if args.max_steps > 0 else None,
        "num_epochs": args.num_train_epochs if args.max_steps <= 0 else None,
        "mixed_precision_training": args.mixed_precision if args.mixed_precision in ("bf16", "fp16") else None,
        "label_smoothing_factor": args.label_smoothing_factor or None,
        "weight_decay": args.weight_decay or None,
    }
    return {name: format_value(value) for name, value in values.items() if value is not None}


def list_framework_versions() -> dict[str, str]:
    versions = {name: getattr(sys.modules.get(module), "__version__", None) for name, module in LIBRARIES.items()}
    return {"littrainer": __version__, **{name: str(version) for name, version in versions.items() if version}}


def get_last_results(log_history: list[Any]) -> dict[tuple[str, str], float]:
    """Return (metric, evaluation set) -> value in the last evaluation."""
    return {key: points[-1].value for key, points in _evaluations(log_history).items()}


def _evaluations(log_history: list[Any]) -> dict[tuple[str, str], list[Point]]:
    curves = parse_log_history(log_history).curves.items()
    return {key: points for key, points in curves if key[1] != TRAINING and key[0] not in COSTS}


def _table_of_results(log_history: list[Any]) -> list[str]:
    """Return a table of the evaluations during training."""
    ends = [index for index, entry in enumerate(log_history) if END_OF_TRAINING_METRIC in entry]
    during = log_history[: ends[-1]] if ends else log_history
    losses = parse_log_history(during).curves.get(("loss", TRAINING), [])
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
    """Return the name of a metric on the card, such as Matthews Correlation."""
    title = " ".join(part[:1].upper() + part[1:] for part in metric.split("_") if part) or metric
    return title if source == EVALUATION else f"{title} ({source})"


def format_number(value: float) -> str:
    """Return a number with four decimals, or a small number with four significant digits."""
    if not math.isfinite(value) or value == int(value):
        return str(float(value))
    return f"{value:.4g}" if abs(value) < 0.001 else f"{value:.4f}"


def _hub_metric(metric: str, source: str, value: float) -> str | None:
    """Return the Hub's name of a metric, only for an evaluation set without a name."""
    name = "rouge" if metric.lower() == "rouge1" else metric.lower()
    has_tag = source == EVALUATION and math.isfinite(value) and name in _get_transformers_table("METRIC_TAGS")
    return name if has_tag else None


def infer_tasks(model: Any) -> list[str]:
    """Return the task of a model's class in transformers' table."""
    name = type(base_model(model)).__name__
    classes = {
        task: {name for entry in table.values() for name in _make_list(entry)}
        for task, table in _get_transformers_table("TASK_MAPPING").items()
    }
    return [task for task, names in classes.items() if name in names][-1:]


def _get_transformers_table(table: str) -> Any:
    modelcard = importlib.import_module("transformers.modelcard") if "transformers" in sys.modules else None
    return getattr(modelcard, table, {})


def fetch_license(repository: str) -> str | None:
    """Return the license of a repository; None if the Hub is not reachable."""
    with suppress(Exception):
        from huggingface_hub import HfApi, constants

        if not constants.HF_HUB_OFFLINE:
            tags = HfApi().model_info(repository, timeout=10.0).tags or []
            return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)
    return None


def list_datasets(dataset: Any, keywords: dict[str, Any]) -> list[dict[str, Any]]:
    """Return keywords of an `EvalResult` for each dataset named by the script, or else for the evaluation dataset.

    `dataset_type` is None without a valid repository name.
    """
    if isinstance(dataset, Mapping) and not is_a(dataset, "datasets.Dataset"):
        dataset = next(iter(dataset.values()), None)
    builder = None
    if is_a(dataset, "datasets.Dataset") or is_a(dataset, "datasets.IterableDataset"):
        builder = None if dataset.builder_name in READ_FROM_FILES else dataset.builder_name
    names, tags, arguments = (_make_list(keywords.get(key)) for key in ("dataset", "dataset_tags", "dataset_args"))
    if not names and not tags and builder:
        names = tags = [builder]
    results = []
    for name, tag, argument in itertools.zip_longest(names, tags, arguments[: max(len(names), len(tags))]):
        repository = tag if tag is not None and REPOSITORY.fullmatch(tag) else None
        source = dataset if builder and repository == builder else None
        split = getattr(source, "split", None)
        config = getattr(source, "config_name", None)
        results.append(
            {
                "dataset_type": repository,
                "dataset_name": tag if name is None else name,
                "dataset_config": config,
                "dataset_split": None if split is None else str(split),
                "dataset_args": config if argument is None else argument,
            }
        )
    return results


def collect_badges(callbacks: Iterable[Any]) -> list[str]:
    badges: list[str] = []
    for callback in callbacks:
        # A tracker that fails must not prevent the card.
        with suppress(Exception):
            badges.extend(filter(None, [getattr(callback, "card_badge", str)()]))
    return badges


def _section(title: str, lines: Mapping[str, str], separator: str = ": ") -> list[str]:
    text = "\n".join(f"- {_escape(name)}{separator}{_escape(value)}" for name, value in lines.items())
    return [f"{title}\n\n{text}"] if lines else []


def _unite(*several: str | Iterable[str] | None) -> list[str]:
    return list(dict.fromkeys(item for value in several for item in _make_list(value)))


def _make_list(value: str | Iterable[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else [str(item) for item in value or () if item is not None]


def _escape(text: str) -> str:
    """Return a text as a single line without HTML tags and links."""
    return " ".join(str(text).split()).replace("<", "&lt;").replace(">", "&gt;").replace("](", "]\\(")
