"""What a check has found, and the page that says so; what is found without a training: disk, Hub, trackers."""

from __future__ import annotations

import datetime
import importlib
import os
import shutil
import sysconfig
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from littrainer.errors.lazy_isinstance import package_of
from littrainer.errors.tracebacks import INTERNAL
from littrainer.hub.repository import advice_for, repository_name, text_of, token_for
from littrainer.tracking.base import TrackerCallback

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

PASSED, NOTE, FAILS = "passed", "note", "would fail"
# Where Python's own files are, and the folder of installed packages; words of an error may show a whole batch.
PYTHON, PACKAGES, MOST_LETTERS = sysconfig.get_path("stdlib"), "site-packages", 600


class Finding(NamedTuple):
    """One thing that was looked at: `passed`, `note` or `would fail`, what it is, what was found, and when it fails."""

    status: str
    about: str
    text: str
    when: str = ""

    def __str__(self) -> str:
        words = f"{self.about}: {self.text}" + (f"\nwhen: {self.when}" if self.when else "")
        return f"{self.status:<11}{textwrap.indent(words, ' ' * 11).lstrip()}"


@dataclass
class CheckReport:
    """What `Trainer.check()` has found; printed, it is a page.

    Parameters:
        training: which training was checked.
        findings: what passed, what is worth knowing, what would fail and when.
        forecast_seconds: how long the whole training takes; None if that is not known.
        forecast_bytes: peak memory of one process, on a GPU what torch allocates there; None if that is not known.
        forecast: lines about time and memory, by their first word.
        is_broken_off: whether one of several processes has failed, and others wait for it.
    """

    training: str
    findings: list[Finding] = field(default_factory=list)
    forecast_seconds: float | None = None
    forecast_bytes: int | None = None
    forecast: dict[str, str] = field(default_factory=dict)
    is_broken_off: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing was found that would fail."""
        return not any(finding.status == FAILS for finding in self.findings)

    def __str__(self) -> str:
        shown = [str(one) for status in (PASSED, NOTE, FAILS) for one in self.findings if one.status == status]
        shown += [f"{name:<11}{text}" for name, text in self.forecast.items()]
        number = sum(finding.status == FAILS for finding in self.findings)
        verdict = f"Would fail: {number}." if number else "Nothing was found that would fail."
        return "\n".join([f"littrainer check: {self.training}", "", *shown, "", verdict])


def words_of(error: BaseException) -> str:
    """Return what an error says: its kind, its words and notes, and the line of the user's code that it came from."""
    said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    lines = [textwrap.shorten(str(one), MOST_LETTERS, placeholder=" ...") for one in said]
    users = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if package_of(frame) not in INTERNAL and not file.startswith(("<", PYTHON)) and PACKAGES not in file:
            users = f"\n({os.path.basename(file)}, line {line}, in {frame.f_code.co_name})"
    return "\n".join(lines) + users


def shown_bytes(number: float) -> str:
    """Return a number of bytes for reading, as `1.5 GB`."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} GB"


def shown_seconds(number: float) -> str:
    """Return a time for reading, as `0.12 s` or `1:23:45`."""
    return f"{number:.3g} s" if number < 100 else str(datetime.timedelta(seconds=round(number)))


def room_on_disk(args: TrainingArguments, folder: str, checkpoint_bytes: int, saves: int) -> Finding:
    """Say whether the disk that a folder is on has room for those of all saves that will lie there at one time."""
    limit = args.save_total_limit or 0
    # The oldest one is deleted when the newest is written, and the best one stays besides.
    most = min(saves, limit + 1 + bool(args.load_best_model_at_end)) if limit > 0 else saves
    free, needed = shutil.disk_usage(folder).free, most * checkpoint_bytes
    text = f"{most} checkpoints of {shown_bytes(checkpoint_bytes)} need {shown_bytes(needed)}"
    text += f", and {shown_bytes(free)} are free"
    if needed <= free:
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
    if access.get("role") == "read" or (access.get("role") == "fineGrained" and not writable & {namespace, name}):
        return Finding(FAILS, "Hub", f"this token may not write in {namespace}: use one with write access", when)
    if namespace not in {user["name"], *(one["name"] for one in user.get("orgs", []))}:
        return Finding(FAILS, "Hub", f"{user['name']} is no member of {namespace}: look at hub_model_id", when)
    return Finding(PASSED, "Hub", f"{user['name']} may push {name}")


def starts_of_trackers(callbacks: Iterable[Any]) -> Iterator[Finding]:
    """Say of each tracker that it is not started, and whether it lacks a key."""
    for callback in callbacks:
        if isinstance(callback, TrackerCallback):
            text = "not started, since that would make a run there"
            is_online = callback.service == "wandb" and os.environ.get("WANDB_MODE", "online") == "online"
            if is_online and not importlib.import_module("wandb").api.api_key:
                text = "no API key was found: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
            yield Finding(NOTE, callback.shown_name, text)
