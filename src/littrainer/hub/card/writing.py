"""`create_model_card`: README.md in the output folder, unless somebody has written theirs."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.did_you_mean import suggestion
from littrainer.arguments.secrets import holds_a_secret, masked, without_secrets
from littrainer.errors.atomic_files import write_whole
from littrainer.errors.lazy_isinstance import is_a
from littrainer.hub.card.block import CARD_NAME, Card, read_card, written_card
from littrainer.hub.card.environment import framework_versions, strategy_of
from littrainer.hub.card.hyperparameters import hyperparameters
from littrainer.hub.card.metadata import check_metadata, joined, metadata_of, own_entries
from littrainer.hub.card.results import results_of
from littrainer.hub.card.subject import Given, subject_of
from littrainer.hub.card.text import card_text
from littrainer.hub.tokens import HUB_TOKEN, TOKEN_VARIABLES

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

SHORTEST_SECRET = 6


def write_card(trainer: Trainer, given: Given) -> Path | None:
    """Write the card of a Trainer's model as README.md into its `output_dir`; only the first process writes.

    A text that somebody has written or changed is kept as it is, file and all. Metadata that somebody has changed, or
    written before there was a text, are kept too, where neither the script nor the results decide them. A file whose
    metadata cannot be read is kept.

    Returns:
        The file that was written; None where it was kept, and in the other processes.

    Raises:
        ValueError: huggingface_hub, where it is installed, finds that the Hub would refuse what the script names.
        OSError: the file cannot be read or written.
    """
    if not trainer.is_world_process_zero():
        return None
    path = Path(trainer.args.output_dir) / CARD_NAME
    found = read_card(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else Card({}, "")
    if found.has_text_of_a_person:
        logger.warning("%s is kept as it is, since it has been edited; delete it to have a new model card.", path)
        return None
    generated, text = _generated(trainer, given)
    check_metadata(generated)
    own = own_entries(found, is_of_peft=is_a(trainer.model, "peft model"))
    metadata = joined(generated, own, given, found.entries_taken_out())
    try:
        check_metadata(metadata)
    except ValueError as error:
        logger.warning("%s is kept as it is, for its metadata cannot be taken over: %s", path, error)
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, written_card(metadata, text, generated))
    model = trainer.accelerator.unwrap_model(trainer.model)
    if is_a(model, "peft model") and hasattr(model, "create_or_update_model_card"):
        _complete_for_adapter(model, path, metadata, generated)
    return path


def refuse_unknown_keywords(create_model_card: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Refuse keywords of `push_to_hub` that a Trainer's `create_model_card`, or an override of it, does not take.

    Raises:
        TypeError: there is such a keyword.
    """
    parameters = inspect.signature(create_model_card).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in keywords:
        if name not in parameters:
            raise TypeError(
                f"push_to_hub() got an unexpected keyword argument {name!r}: {suggestion(name, parameters)}. "
                "Beside its own it takes those of create_model_card."
            )


def _generated(trainer: Trainer, given: Given) -> tuple[dict[str, Any], str]:
    """Metadata and text of a new card."""
    subject = subject_of(trainer, given)
    results = results_of(trainer.state, loads_best=bool(trainer.args.load_best_model_at_end))
    badges = [badge for badge in map(_badge_of, trainer.callback_handler.callbacks) if badge]
    text = card_text(subject, results, hyperparameters(trainer), framework_versions(), strategy_of(trainer), badges)
    hide = _Secrets(trainer.args)
    return hide.hidden(metadata_of(subject, results)), hide.in_text(text)


def _badge_of(callback: Any) -> str | None:
    badge = getattr(callback, "card_badge", None)
    try:
        return badge() if callable(badge) else None
    except Exception:
        # What a tracker cannot say is no reason to have no card.
        logger.info("%s has no badge for the model card:", type(callback).__name__, exc_info=True)
        return None


def _complete_for_adapter(model: Any, path: Path, before: dict[str, Any], generated: dict[str, Any]) -> None:
    """Let PEFT add what it knows of an adapter, and give back the tags that it takes away."""
    model.create_or_update_model_card(str(path.parent))
    found = read_card(path.read_text(encoding="utf-8"))
    metadata = dict(found.metadata or {})
    tags = before.get("tags", [])
    of_peft = [tag for tag in metadata.get("tags") or [] if tag not in tags]
    metadata["tags"] = [*tags, *of_peft]
    # PEFT names the folder that the model below the adapter was loaded from, also where it is none of the Hub.
    metadata.pop("base_model", None)
    if "base_model" in before:
        metadata["base_model"] = before["base_model"]
    added = {name: entry for name, entry in metadata.items() if before.get(name) != entry}
    generated = {**generated, **added, "tags": [*generated.get("tags", []), *of_peft]}
    write_whole(path, written_card(metadata, found.text, generated))


class _Secrets:
    """Keeps secrets of the arguments and the environment out of a card, wherever they would stand."""

    def __init__(self, args: Any) -> None:
        named = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(args)}
        secrets = {value: masked(name) for name, value in named.items() if holds_a_secret(name)}
        secrets.update({os.environ.get(name): masked(name) for name in TOKEN_VARIABLES})
        self.known = {
            secret: mask
            for secret, mask in secrets.items()
            if isinstance(secret, str) and len(secret) >= SHORTEST_SECRET
        }

    def in_text(self, text: str) -> str:
        for secret, mask in self.known.items():
            text = text.replace(secret, mask)
        return HUB_TOKEN.sub(masked("hub_token"), without_secrets(text))

    def hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.in_text(value)
        if isinstance(value, dict):
            return {name: self.hidden(item) for name, item in value.items()}
        return [self.hidden(item) for item in value] if isinstance(value, list) else value
