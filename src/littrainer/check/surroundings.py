"""What a training needs besides model and data: rights on the Hub, trackers, room on the disk. Nothing is changed."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.check.findings import FAILS, NOTE, PASSED, Finding, shown_bytes
from littrainer.hub.repository import advice_for, repository_name, text_of, token_for
from littrainer.tracking.base import TrackerCallback

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

# The service whose start writes into a folder alone, so that it can be tried in another one.
WRITES_FILES_ONLY = "tensorboard"


def room_on_disk(args: TrainingArguments, checkpoint_bytes: int, saves: int) -> Finding:
    """Say whether the disk has room for those of all saves that will lie there at one time."""
    limit = args.save_total_limit or 0
    # The oldest one is deleted when the newest is written, and the best one stays besides.
    most = min(saves, limit + 1 + bool(args.load_best_model_at_end)) if limit > 0 else saves
    free = shutil.disk_usage(next(one for one in Path(args.output_dir).absolute().parents if one.is_dir())).free
    needed = f"{most} checkpoints of {shown_bytes(checkpoint_bytes)} need {shown_bytes(most * checkpoint_bytes)}"
    text = f"{needed}, and {shown_bytes(free)} are free"
    if most * checkpoint_bytes <= free:
        return Finding(PASSED, "disk", text)
    text += ": set save_total_limit, save less often, or choose another output_dir"
    return Finding(FAILS, "disk", text, f"at save {free // checkpoint_bytes + 1} of {saves}")


def rights_on_hub(args: TrainingArguments) -> Finding:
    """Say whether the token may push, by one request that reads what the Hub knows of it."""
    from huggingface_hub import HfApi, constants

    name, token, when = repository_name(args), token_for(args), "at the first push"
    if constants.HF_HUB_OFFLINE:
        return Finding(NOTE, "Hub", f"rights to push {name} were not looked at, since HF_HUB_OFFLINE is set")
    try:
        user: Any = HfApi().whoami(token=token)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        fails = status in (401, 403) or "LocalTokenNotFound" in type(error).__name__
        return Finding(FAILS if fails else NOTE, "Hub", f"{text_of(error, token)} {advice_for(error)}", when * fails)
    namespace = name.partition("/")[0] if "/" in name else user["name"]
    access = (user.get("auth") or {}).get("accessToken") or {}
    scopes = (access.get("fineGrained") or {}).get("scoped", [])
    writable = {scope["entity"]["name"] for scope in scopes if "repo.write" in scope["permissions"]}
    may_write = access.get("role") != "fineGrained" or bool(writable & {namespace, name})
    if access.get("role") == "read" or not may_write:
        return Finding(FAILS, "Hub", f"this token may not write in {namespace}: use one with write access", when)
    if namespace not in {user["name"], *(one["name"] for one in user.get("orgs", []))}:
        return Finding(FAILS, "Hub", f"{user['name']} is no member of {namespace}: look at hub_model_id", when)
    return Finding(PASSED, "Hub", f"{user['name']} may push {name}")


def starts_of_trackers(callbacks: Iterable[Any]) -> Iterator[Finding]:
    """Say of each tracker that it is not started, and whether it lacks a key."""
    for callback in callbacks:
        if isinstance(callback, TrackerCallback) and callback.service != WRITES_FILES_ONLY:
            text = "not started, since that would make a run there"
            is_online = callback.service == "wandb" and os.environ.get("WANDB_MODE", "online") == "online"
            if is_online and not importlib.import_module("wandb").api.api_key:
                text = "no API key was found: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
            yield Finding(NOTE, callback.shown_name, text)
