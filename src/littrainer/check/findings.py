"""What a check has found, and the page that says so; what is found without a training: disk, Hub, trackers."""

from __future__ import annotations

import datetime
import os
import shutil
import sysconfig
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from littrainer.checkpoint.retention import RESUME_FILE
from littrainer.hub.repository import advise, choose_token, describe_error, repository_name
from littrainer.tracking.base import TrackerCallback

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

PASSED, NOTE, FAILS = "passed", "note", "would fail"
# Where no code of the user is; words of an error may show a whole batch.
OTHERS, MAX_ERROR_CHARACTERS = ("<", sysconfig.get_path("stdlib"), str(Path(__file__).parents[1])), 600
# Tracker -> variables of the environment and files, one of which says how it signs in or that it need not; and what to
# do if there is none.
LOGINS = {
    "wandb": ("WANDB_API_KEY WANDB_MODE WANDB_IDENTITY_TOKEN_FILE NETRC ~/.netrc ~/_netrc", "run `wandb login`"),
    "comet_ml": ("COMET_API_KEY COMET_START_ONLINE COMET_CONFIG .comet.config ~/.comet.config", "run `comet login`"),
    "clearml": ("CLEARML_API_ACCESS_KEY CLEARML_OFFLINE_MODE CLEARML_CONFIG_FILE ~/clearml.conf", "run `clearml-init`"),
    "swanlab": ("SWANLAB_API_KEY SWANLAB_MODE .swanlab ~/.swanlab", "run `swanlab login`"),
    "dagshub": ("MLFLOW_TRACKING_URI", "call `dagshub.init()` in the script"),
}


class Finding(NamedTuple):
    """One thing that was looked at: `passed`, `note` or `would fail`, what it is, what was found, and when it fails."""

    status: str
    about: str
    text: str
    when: str = ""

    def __str__(self) -> str:
        words = f"{self.about}: {self.text}" + (f"\nwhen: {self.when}" if self.when else "")
        return f"{self.status:<11}{textwrap.indent(words, ' ' * 11).lstrip()}"


def make_finding(about: str, passed: str, problem: str = "", when: str = "") -> Finding:
    """Return that something would fail with a problem, and when; or that it has passed if there is none."""
    return Finding(FAILS, about, problem, when) if problem else Finding(PASSED, about, passed)


@dataclass
class CheckReport:
    """What `Trainer.check()` has found; printed, it is a page.

    Parameters:
        training: which training was checked.
        findings: what passed, what is worth knowing, what would fail and when.
        forecast_seconds: how long the whole training takes; None if that is not known.
        forecast_bytes: peak memory of one process, on a GPU what torch allocates there; None if that is not known.
        forecast: lines about time and memory, by their first word.
        is_interrupted: whether one of several processes has failed, and others wait for it.
    """

    training: str
    findings: list[Finding] = field(default_factory=list)
    forecast_seconds: float | None = None
    forecast_bytes: int | None = None
    forecast: dict[str, str] = field(default_factory=dict)
    is_interrupted: bool = False

    @property
    def failures(self) -> list[Finding]:
        """What would fail."""
        return [one for one in self.findings if one.status == FAILS]

    @property
    def ok(self) -> bool:
        """Whether nothing was found that would fail."""
        return not self.failures

    def __str__(self) -> str:
        shown = sorted(self.findings, key=lambda one: (PASSED, NOTE, FAILS).index(one.status))
        forecast = [f"{name:<11}{text}" for name, text in self.forecast.items()]
        verdict = "Nothing was found that would fail." if self.ok else f"Would fail: {len(self.failures)}."
        return "\n".join([f"littrainer check: {self.training}", "", *map(str, shown), *forecast, "", verdict])


def format_error(error: BaseException) -> str:
    """Return what an error says: its kind, its words and notes, and the line of the user's code that it came from."""
    said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    lines = [textwrap.shorten(str(one), MAX_ERROR_CHARACTERS, placeholder=" ...") for one in said]
    users = ""
    for at in traceback.extract_tb(error.__traceback__):
        if not at.filename.startswith(OTHERS) and "site-packages" not in at.filename:
            users = f"\n({Path(at.filename).name}, line {at.lineno}, in {at.name})"
    return ("\n".join(lines) + users).encode("utf-8", "backslashreplace").decode()


def format_seconds(number: float) -> str:
    """Return a time for reading, as `0.12 s` or `1:23:45`."""
    return f"{number:.3g} s" if number < 100 else str(datetime.timedelta(seconds=round(number)))


def check_disk(args: TrainingArguments, checkpoint: Path, saves: int) -> Finding:
    """Say whether the disk that a checkpoint is on has room for those of all saves that will lie there at one time."""
    sizes = {path.relative_to(checkpoint): path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()}
    of_resumes = sum(size for path, size in sizes.items() if RESUME_FILE.fullmatch(path.parts[0]))
    whole, limit, best = sum(sizes.values()), args.save_total_limit or 0, int(bool(args.load_best_model_at_end))
    if args.save_total_limit_best is not None and (args.save_total_limit is None or limit > 0):
        limit, best = limit or 1, args.save_total_limit_best
    # The oldest one is deleted, or thinned, when the newest is written, and the best ones stay besides.
    most = min(saves, limit + 1 + best) if limit > 0 else saves
    complete = saves if args.keep_optimizer_states is None else args.keep_optimizer_states + 1
    needed = [number * whole - max(number - complete, 0) * of_resumes for number in range(most + 1)]
    # It may be a link to another disk.
    free = shutil.disk_usage(args.output_dir if os.path.exists(args.output_dir) else checkpoint).free
    words = [tqdm.format_sizeof(number, "B") for number in (whole, needed[-1], free)]
    text = f"{most} checkpoints of {words[0]} need {words[1]}, and {words[2]} are free"
    first = next((number for number, size in enumerate(needed) if size > free), None)
    problem = f"{text}: set save_total_limit, save less often, or choose another output_dir"
    return make_finding("disk", text, "" if first is None else problem, f"at save {first} of {saves}")


def check_hub_permissions(args: TrainingArguments) -> Finding:
    """Say whether the token may push, by one request that reads what the Hub knows of it."""
    from huggingface_hub import HfApi, constants

    name, token, when = repository_name(args), choose_token(args), "at the first push"
    if constants.HF_HUB_OFFLINE:
        return Finding(NOTE, "Hub", f"rights to push {name} were not looked at, since HF_HUB_OFFLINE is set")
    try:
        user: Any = HfApi().whoami(token=token)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        fails = status in (401, 403) or "LocalTokenNotFound" in type(error).__name__
        return Finding(FAILS if fails else NOTE, "Hub", f"{describe_error(error, token)} {advise(error)}", when * fails)
    namespace = name.partition("/")[0] if "/" in name else user["name"]
    access = (user.get("auth") or {}).get("accessToken") or {}
    scopes = (access.get("fineGrained") or {}).get("scoped", [])
    writable = {scope["entity"]["name"] for scope in scopes if "repo.write" in scope["permissions"]}
    problem = ""
    if namespace not in {user["name"], *(one["name"] for one in user.get("orgs", []))}:
        problem = f"{user['name']} is no member of {namespace}: look at hub_model_id"
    if access.get("role") == "read" or (access.get("role") == "fineGrained" and not writable & {namespace, name}):
        problem = f"this token may not write in {namespace}: use one with write access"
    return make_finding("Hub", f"{user['name']} may push {name}", problem, when)


def check_tracker_logins(callbacks: Iterable[Any]) -> Iterator[Finding]:
    """Say of each tracker, whose package its callback has needed already, whether its login is there; start none."""
    for callback in callbacks:
        if isinstance(callback, TrackerCallback):
            places, remedy = LOGINS.get(callback.service, ("", ""))
            status, text = PASSED, f"found its package{' and its login' * bool(places)}; no run was started"
            if places and not any(one in os.environ or Path(one).expanduser().exists() for one in places.split()):
                status = NOTE
                text = f"no login was found, and nothing would be reported: {remedy}, or set {places.split()[0]}"
            yield Finding(status, callback.display_name, text)
