"""Findings of a check and their report; checks of disk, Hub and trackers."""

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
# Prefixes of paths without user code.
LIBRARY_PATHS = ("<", sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))
MAX_ERROR_CHARACTERS = 600
# Tracker -> variables and files, any of which is a login or makes it unnecessary; and the remedy.
LOGINS = {
    "wandb": ("WANDB_API_KEY WANDB_MODE WANDB_IDENTITY_TOKEN_FILE NETRC ~/.netrc ~/_netrc", "run `wandb login`"),
    "comet_ml": ("COMET_API_KEY COMET_START_ONLINE COMET_CONFIG .comet.config ~/.comet.config", "run `comet login`"),
    "clearml": ("CLEARML_API_ACCESS_KEY CLEARML_OFFLINE_MODE CLEARML_CONFIG_FILE ~/clearml.conf", "run `clearml-init`"),
    "swanlab": ("SWANLAB_API_KEY SWANLAB_MODE .swanlab ~/.swanlab", "run `swanlab login`"),
    "dagshub": ("MLFLOW_TRACKING_URI", "call `dagshub.init()` in the script"),
}


class Finding(NamedTuple):
    """Result of a check: status (`passed`, `note` or `would fail`), subject, text, and time of failure."""

    status: str
    about: str
    text: str
    when: str = ""

    def __str__(self) -> str:
        text = f"{self.about}: {self.text}" + (f"\nwhen: {self.when}" if self.when else "")
        return f"{self.status:<11}{textwrap.indent(text, ' ' * 11).lstrip()}"


def make_finding(about: str, passed: str, problem: str = "", when: str = "") -> Finding:
    return Finding(FAILS, about, problem, when) if problem else Finding(PASSED, about, passed)


@dataclass
class CheckReport:
    """Printable report of `Trainer.check()`.

    Parameters:
        training: description of the training that was checked.
        findings: what passed, what is worth knowing, what would fail and when.
        forecast_seconds: duration of the whole training; None if unknown.
        forecast_bytes: peak memory of one process, on a GPU allocated by torch; None if unknown.
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
        """Findings that would fail."""
        return [finding for finding in self.findings if finding.status == FAILS]

    @property
    def ok(self) -> bool:
        """True if there are no failures."""
        return not self.failures

    def __str__(self) -> str:
        shown = sorted(self.findings, key=lambda finding: (PASSED, NOTE, FAILS).index(finding.status))
        forecast = [f"{name:<11}{text}" for name, text in self.forecast.items()]
        checks = sum(finding.status != NOTE for finding in self.findings)
        failed = f"{len(self.failures)} of {checks} checks failed."
        verdict = "Nothing was found that would fail." if self.ok else failed
        return "\n".join([f"littrainer check: {self.training}", "", *map(str, shown), *forecast, "", verdict])


def format_error(error: BaseException) -> str:
    """Return an error's type, message and notes, and the last line of user code."""
    texts = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    lines = [textwrap.shorten(str(text), MAX_ERROR_CHARACTERS, placeholder=" ...") for text in texts]
    location = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(LIBRARY_PATHS) and "site-packages" not in frame.filename:
            location = f"\n({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"
    return ("\n".join(lines) + location).encode("utf-8", "backslashreplace").decode()


def format_seconds(number: float) -> str:
    """Return a readable duration, as `0.12 s` or `1:23:45`."""
    return f"{number:.3g} s" if number < 100 else str(datetime.timedelta(seconds=round(number)))


def check_disk(args: TrainingArguments, checkpoint: Path, saves: int) -> Finding:
    """Return whether the disk has space for all checkpoints that exist at the same moment."""
    sizes = {path.relative_to(checkpoint): path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()}
    resume_bytes = sum(size for path, size in sizes.items() if RESUME_FILE.fullmatch(path.parts[0]))
    total_bytes, limit, best = sum(sizes.values()), args.save_total_limit or 0, int(bool(args.load_best_model_at_end))
    if args.save_total_limit_best is not None and (args.save_total_limit is None or limit > 0):
        limit, best = limit or 1, args.save_total_limit_best
    # The oldest checkpoint is deleted after the newest is written; the best are kept too.
    max_count = min(saves, limit + 1 + best) if limit > 0 else saves
    complete = saves if args.keep_optimizer_states is None else args.keep_optimizer_states + 1
    needed = [count * total_bytes - max(count - complete, 0) * resume_bytes for count in range(max_count + 1)]
    # output_dir may be a link to another disk.
    free = shutil.disk_usage(args.output_dir if os.path.exists(args.output_dir) else checkpoint).free
    shown = [tqdm.format_sizeof(size, "B") for size in (total_bytes, needed[-1], free)]
    text = f"{max_count} checkpoints of {shown[0]} need {shown[1]}, and {shown[2]} are free"
    first = next((number for number, size in enumerate(needed) if size > free), None)
    problem = f"{text}: set save_total_limit, save less often, or choose another output_dir"
    return make_finding("disk", text, "" if first is None else problem, f"at save {first} of {saves}")


def check_hub_permissions(args: TrainingArguments) -> Finding:
    """Return whether the token may push, by a single `whoami` request."""
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
    if namespace not in {user["name"], *(org["name"] for org in user.get("orgs", []))}:
        problem = f"{user['name']} is no member of {namespace}: look at hub_model_id"
    if access.get("role") == "read" or (access.get("role") == "fineGrained" and not writable & {namespace, name}):
        problem = f"this token may not write in {namespace}: use one with write access"
    return make_finding("Hub", f"{user['name']} may push {name}", problem, when)


def check_tracker_logins(callbacks: Iterable[Any]) -> Iterator[Finding]:
    """Yield whether each tracker's login exists, without starting a run."""
    for callback in callbacks:
        if isinstance(callback, TrackerCallback):
            sources, remedy = LOGINS.get(callback.service, ("", ""))
            status, text = PASSED, f"found its package{' and its login' * bool(sources)}; no run was started"
            if sources and not any(name in os.environ or Path(name).expanduser().exists() for name in sources.split()):
                status = NOTE
                text = f"no login was found, and nothing would be reported: {remedy}, or set {sources.split()[0]}"
            yield Finding(status, callback.display_name, text)
