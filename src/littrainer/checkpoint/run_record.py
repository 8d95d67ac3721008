"""littrainer_run.json: what a run was started with, for `littrainer report` and `littrainer compare`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.secrets import holds_a_secret, without_secrets
from littrainer.arguments.shown_arguments import as_text
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.data.fingerprint import described, described_model
from littrainer.errors.version import __version__
from littrainer.strategies.choice import strategy_name

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

LONGEST_GIT_SECONDS = 5


def facts_of_run(model: Any, datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the code, the data and the model of a run that begins.

    Parameters:
        model: its weights are those that the run begins with; None leaves them out.
        datasets: by name; a dict among them is a dataset for each of its names.
    """
    named: dict[str, Any] = {}
    for name, dataset in datasets.items():
        named |= (
            {f"{name} {key}": one for key, one in dataset.items()} if isinstance(dataset, dict) else {name: dataset}
        )
    return {
        "code": _state_of_code(str(getattr(sys.modules["__main__"], "__file__", None) or os.getcwd())),
        "data": {name: described(dataset) for name, dataset in named.items() if dataset is not None},
        "model": {} if model is None else described_model(model),
    }


def write_run_record(args: TrainingArguments, run_dir: Path | str, facts: Mapping[str, Any] | None = None) -> None:
    """Write littrainer_run.json: arguments without secrets, versions, the device, and what `facts_of_run` returned.

    Raises:
        OSError: it cannot be written.
    """
    names = [field.name for field in dataclasses.fields(args) if field.init and not holds_a_secret(field.name)]
    # `lightning` may hold objects of any size.
    shown = {name: getattr(args, name) for name in names if name != "lightning"}
    versions = {
        name: getattr(sys.modules.get(name), "__version__", None)
        for name in ("torch", "lightning", "transformers", "datasets", "peft", "numpy")
    }
    device = args.device
    environment = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": args.world_size,
        "strategy": strategy_name(args),
        "threads": torch.get_num_threads(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    record = {
        "versions": {"littrainer": __version__, **versions},
        "environment": environment,
        **(facts or {}),
        "arguments": without_secrets(shown),
    }
    text = json.dumps(record, indent=2, default=_as_json, skipkeys=True)
    # Not by another file, which a killed run would leave: half a record is written again by the next run.
    Path(run_dir, RUN_RECORD_NAME).write_text(f"{text}\n", "utf-8")


def _as_json(value: Any) -> Any:
    is_configuration = hasattr(value, "to_dict") and not isinstance(value, type)
    return without_secrets(value.to_dict()) if is_configuration else as_text(value)


@functools.cache
def _state_of_code(script: str) -> dict[str, Any]:
    """Return the script's name and hash, the commit of its repository, and a hash of what is not committed there.

    It is asked for once in a process, since later changes do not reach code that is loaded.
    """
    path = Path(script)
    folder = path.resolve().parent if path.is_file() else path
    changes = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-color")
    return {
        "script": path.name if path.is_file() else None,
        "script hash": _hash(path.read_bytes()) if path.is_file() else None,
        "commit": (_git(folder, "rev-parse", "HEAD") or b"").decode().strip()[:12] or None,
        "uncommitted changes": _hash(changes) if changes else None,
    }


def _git(folder: Path, *words: str) -> bytes | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LONGEST_GIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()
