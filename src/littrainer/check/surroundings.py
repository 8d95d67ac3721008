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

# Services whose start writes into a folder alone, so that it can be tried in another one.
WRITES_FILES_ONLY = "tensorboard"


def existing_folder(path: str) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    folder = Path(path).absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def room_on_disk(args: TrainingArguments, checkpoint_bytes: int, saves: int) -> Finding:
    """Say whether the disk has room for the checkpoints that will lie there at one time.

    Parameters:
        checkpoint_bytes: size of one.
        saves: checkpoints that the training writes.
    """
    limit = args.save_total_limit
    # The oldest one is deleted when the newest is written, and the best one stays besides.
    most = saves if not limit or limit <= 0 else min(saves, limit + 1 + bool(args.load_best_model_at_end))
    free = shutil.disk_usage(existing_folder(str(args.output_dir))).free
    needed = most * checkpoint_bytes
    text = (
        f"{most} checkpoint{'s' * (most != 1)} of {shown_bytes(checkpoint_bytes)} need {shown_bytes(needed)}, and "
        f"{shown_bytes(free)} are free"
    )
    if needed <= free:
        return Finding(PASSED, "disk", text)
    fitting = free // max(checkpoint_bytes, 1)
    advice = "set save_total_limit, save less often, or choose another output_dir"
    return Finding(FAILS, "disk", f"{text}: {advice}", f"at save {fitting + 1} of {saves}")


def rights_on_hub(args: TrainingArguments) -> Iterator[Finding]:
    """Say whether the token may push, by one request that reads what the Hub knows of it."""
    if not args.push_to_hub:
        return
    from huggingface_hub import HfApi, constants

    name, when = repository_name(args), "at the first push"
    if constants.HF_HUB_OFFLINE:
        yield Finding(NOTE, "Hub", f"rights to push {name} were not looked at, since HF_HUB_OFFLINE is set")
        return
    token = token_for(args)
    try:
        user: Any = HfApi().whoami(token=token)
    except Exception as error:
        is_refused = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
        refused = is_refused or "LocalTokenNotFoundError" in type(error).__name__
        advice = advice_for(error) or "Log in with `hf auth login`, or set hub_token."
        yield Finding(FAILS if refused else NOTE, "Hub", f"{text_of(error, token)[:300]} {advice}", when * refused)
        return
    namespace = name.partition("/")[0] if "/" in name else user["name"]
    access = (user.get("auth") or {}).get("accessToken") or {}
    role = access.get("role")
    known = {user["name"], *(one["name"] for one in user.get("orgs", []))}
    scopes = (access.get("fineGrained") or {}).get("scoped", [])
    may_write = {
        (scope.get("entity") or {}).get("name") for scope in scopes if "repo.write" in scope.get("permissions", [])
    }
    if role == "read":
        yield Finding(FAILS, "Hub", f"the token of {user['name']} may only read: use one with write access", when)
    elif namespace not in known:
        text = f"{user['name']} is no member of {namespace}, and cannot push {name}: look at hub_model_id"
        yield Finding(FAILS, "Hub", text, when)
    elif role == "fineGrained" and not may_write & {namespace, f"{namespace}/{name.rpartition('/')[2]}"}:
        yield Finding(FAILS, "Hub", f"the token has no right to write in {namespace} (repo.write)", when)
    else:
        yield Finding(PASSED, "Hub", f"{user['name']} may push {name}")


def starts_of_trackers(callbacks: Iterable[Any]) -> Iterator[Finding]:
    """Say of each tracker that it is not started, and whether it lacks a key."""
    for callback in callbacks:
        if not isinstance(callback, TrackerCallback) or callback.service == WRITES_FILES_ONLY:
            continue
        name, text = callback.shown_name, "not started, since that would make a run there"
        is_online = callback.service == "wandb" and os.environ.get("WANDB_MODE", "online") == "online"
        if is_online and not importlib.import_module("wandb").api.api_key:
            text = "no API key was found: `wandb login`, or set WANDB_API_KEY; training would ask, or go on without"
        yield Finding(NOTE, name, text)
