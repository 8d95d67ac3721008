"""The command `littrainer env`: prints the environment for a bug report, without importing torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from littrainer.commands.command_line import CommandParser
from littrainer.runtime.version import __version__

DESCRIPTION = (
    "Show what is installed here: versions, devices and environment variables that matter to a training, and what does "
    "not fit together. Paste the text, which is Markdown, into a bug report. Secrets are hidden and the home folder is "
    "written as ~, but read the text before you publish it."
)
PACKAGE_NAME = "littrainer"
# Extras with pinned versions; users may have others.
DEVELOPMENT_EXTRAS = frozenset({"test", "demo"})
PACKAGES = (
    *("torch", "lightning", "pytorch-lightning", "torchmetrics", "numpy", "transformers", "accelerate", "datasets"),
    *("tokenizers", "safetensors", "huggingface-hub", "hf-xet", "peft", "trl", "evaluate", "sentence-transformers"),
    *("setfit", "kernels", "pyarrow", "keras", "tensorflow", "torchvision", "torchaudio", "torch-xla", "torch-npu"),
    *("torchdata", "triton", "deepspeed", "mpi4py", "liger-kernel", "flash-attn", "xformers", "torchao"),
    *("transformer-engine", "bitsandbytes", "galore-torch", "apollo-torch", "grokadamw", "lomo-optim", "schedulefree"),
    *("torch-optimi", "torchdistx", "optuna", "ray", "cloudpickle", "tensorboard", "tensorboardX", "wandb", "mlflow"),
    *("mlflow-skinny", "trackio", "comet-ml", "clearml", "neptune", "swanlab", "dvclive", "codecarbon", "flytekit"),
    *("azureml-core", "dagshub", "matplotlib", "psutil", "tqdm", "rich", "packaging"),
)
# A broken driver may kill the process; torch may print lines before the result.
QUERY_TORCH = """\
import json, torch.utils.collect_env as c
print(json.dumps({name: value for name, value in c.get_env_info()._asdict().items() if name != "pip_packages"}))
"""
QUERY_TIMEOUT_S = 120

VARIABLES = re.compile(
    r"(LITTRAINER|PL|LT|LIGHTNING|ACCELERATE|FSDP|PARALLELISM_CONFIG|TORCH\w*|PYTORCH|CUDA|CUBLAS|CUDNN|NCCL|GLOO|TRITON"
    r"|XLA|HIP|ROCR|NVIDIA|OMP|MKL|OPENBLAS|KMP|TOKENIZERS|SLURM|OMPI|HF|TRANSFORMERS|DATASETS|DEEPSPEED|RAY|TUNE|OPTUNA"
    r"|WANDB|MLFLOW|COMET|CLEARML|NEPTUNE|SWANLAB|TRACKIO|KERAS)_\w+"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|MASTER_(ADDR|PORT)|PYTHON\w+|LOGLEVEL|LD_PRELOAD|LD_LIBRARY_PATH|LANG|LC_ALL"
    r"|VIRTUAL_ENV|CONDA_PREFIX|TMPDIR"
)
HIDDEN = "(hidden)"
# Patterns of secrets; they rather match too much than too little.
SECRET_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASS|CREDENTIAL|API_?KEY|(^|_)(KEYS?|PWD?|AUTH|BEARER|JWT|COOKIE)(_|$)")
SECRET_VALUE = re.compile(
    r"(^|[\s,;='\"])[^\s:/@]+:\S*@|://\S*[@?#]"
    r"|(token(?!iz)|secret|passw|credential|api[_-]?key|bearer|basic)\W|\b(hf_|gh[a-z]_|glpat-|sk-|eyJ)\w",
    re.IGNORECASE,
)
SWITCHES = frozenset({"", "0", "1", "true", "false", "yes", "no", "on", "off"})


def main(words: Sequence[str]) -> int:
    CommandParser("env", DESCRIPTION).parse_args(words)
    torch = query_torch()
    versions = {name: get_version(name) for name in PACKAGES}
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = ", ".join(name for name, version in versions.items() if not version)
    problems = [*([torch["error"]] if "error" in torch else []), *find_problems()] or ["none"]
    lines = [f"### littrainer {__version__}", "", f"- {Path(__file__).parents[1]}", "", "### findings", ""]
    lines += [f"- {' '.join(problem.split())}" for problem in problems]
    lines += ["", "### packages", "", f"- installed: {installed}", f"- not installed: {missing}"]
    sections = {
        "torch": torch,
        "accelerate's configuration": read_accelerate_configuration(),
        "environment variables": select_variables(os.environ),
    }
    for title, facts in sections.items():
        shown = [f"{name}: {value}" for name, value in facts.items()]
        lines += ["", f"### {title}", "", "```text", *(shown or ["none"]), "```"]
    text, home = "\n".join(lines), os.path.expanduser("~").rstrip(os.sep)
    print(re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if home else text)
    return 0


def query_torch() -> dict[str, Any]:
    """Return the facts of `torch.utils.collect_env`, or an `error`."""
    # Import the same torch as this process.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-c", QUERY_TORCH]
    try:
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=QUERY_TIMEOUT_S
        )
        return {name: value for name, value in json.loads(process.stdout.splitlines()[-1]).items() if value is not None}
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch and looking at its devices took more than {QUERY_TIMEOUT_S} seconds"}
    except (IndexError, ValueError):
        reason = (process.stderr.strip().splitlines() or ["without a message"])[-1]
        return {"error": f"import torch ended its process with status {process.returncode}: {reason}"}


def get_version(name: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


def find_problems() -> Iterator[str]:
    """Yield missing packages and unsupported versions, with remedies."""
    if get_version(PACKAGE_NAME) is None:
        yield "littrainer is not installed as a package here, so that versions cannot be checked: install it"
        return
    for text in requires(PACKAGE_NAME) or []:
        from packaging.requirements import Requirement

        requirement = Requirement(text)
        of_extra = re.search(r"extra == ['\"](\w+)", text)
        extra = of_extra[1] if of_extra else ""
        is_relevant = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if extra in DEVELOPMENT_EXTRAS or not is_relevant:
            continue
        installed = get_version(requirement.name)
        remedy = f"pip install '{requirement.name}{requirement.specifier}'"
        if installed is None and not extra:
            yield f"{requirement.name} is not installed, and littrainer needs it: {remedy}"
        elif installed is not None and not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement.name} {installed} is outside what littrainer supports: {remedy}"


def read_accelerate_configuration() -> dict[str, str]:
    folder = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    files = [Path(folder, "accelerate", f"default_config.{ending}") for ending in ("yaml", "json")]
    return {str(path): path.read_text(errors="replace") for path in files if path.is_file()}


def select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may affect a training, without secrets."""
    set_here = {name: environment[name] for name in sorted(environment) if VARIABLES.fullmatch(name)}
    secrets = [value for name, value in environment.items() if _is_secret(name, value) and len(value) > 5]
    return {
        name: HIDDEN if _is_secret(name, value) or any(secret in value for secret in secrets) else value
        for name, value in set_here.items()
    }


def _is_secret(name: str, value: str) -> bool:
    is_switch = value.lower() in SWITCHES
    return not is_switch and bool(SECRET_NAME.search(name.upper()) or SECRET_VALUE.search(value))
