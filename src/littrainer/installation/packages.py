"""Which packages are installed, whether their versions are supported, and whether they are what Python would import.

Nothing is imported for it: versions come from the metadata that pip leaves.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

import littrainer

OWN_NAME = "littrainer"
# Extras of ours that pin what the tests compare with, which says nothing about what users may have.
EXTRAS_FOR_DEVELOPMENT = frozenset({"test", "demo"})
# Where pip notes what it installed from.
SOURCE_NOTE = "direct_url.json"

# Group -> distribution -> the module that is imported for it.
PACKAGES: dict[str, dict[str, str]] = {
    "training": {
        "torch": "torch",
        "lightning": "lightning",
        "pytorch-lightning": "pytorch_lightning",
        "lightning-fabric": "lightning_fabric",
        "torchmetrics": "torchmetrics",
        "numpy": "numpy",
        "keras": "keras",
        "tensorflow": "tensorflow",
        "torchvision": "torchvision",
        "torchaudio": "torchaudio",
        "torch-xla": "torch_xla",
        "torch-npu": "torch_npu",
        "torchdata": "torchdata",
        "triton": "triton",
    },
    "Hugging Face": {
        "transformers": "transformers",
        "accelerate": "accelerate",
        "datasets": "datasets",
        "tokenizers": "tokenizers",
        "safetensors": "safetensors",
        "huggingface-hub": "huggingface_hub",
        "hf-xet": "hf_xet",
        "peft": "peft",
        "trl": "trl",
        "evaluate": "evaluate",
        "sentence-transformers": "sentence_transformers",
        "setfit": "setfit",
        "kernels": "kernels",
        "pyarrow": "pyarrow",
    },
    "scale and kernels": {
        "deepspeed": "deepspeed",
        "mpi4py": "mpi4py",
        "liger-kernel": "liger_kernel",
        "flash-attn": "flash_attn",
        "xformers": "xformers",
        "torchao": "torchao",
        "transformer-engine": "transformer_engine",
    },
    "optimizers": {
        "bitsandbytes": "bitsandbytes",
        "galore-torch": "galore_torch",
        "apollo-torch": "apollo_torch",
        "grokadamw": "grokadamw",
        "lomo-optim": "lomo_optim",
        "schedulefree": "schedulefree",
        "torch-optimi": "optimi",
        "torchdistx": "torchdistx",
    },
    "search": {"optuna": "optuna", "ray": "ray", "cloudpickle": "cloudpickle"},
    "trackers": {
        "tensorboard": "tensorboard",
        "tensorboardX": "tensorboardX",
        "wandb": "wandb",
        "mlflow": "mlflow",
        "mlflow-skinny": "mlflow",
        "trackio": "trackio",
        "comet-ml": "comet_ml",
        "clearml": "clearml",
        "neptune": "neptune",
        "swanlab": "swanlab",
        "dvclive": "dvclive",
        "codecarbon": "codecarbon",
        "flytekit": "flytekit",
        "azureml-core": "azureml",
        "dagshub": "dagshub",
    },
    "other": {"matplotlib": "matplotlib", "psutil": "psutil", "tqdm": "tqdm", "rich": "rich", "packaging": "packaging"},
}


class Installed(NamedTuple):
    """One copy of a package.

    Parameters:
        name: as PyPI has it.
        version: as its metadata says.
        folder: where it lies.
        is_editable: whether it is a link to a source tree, which its metadata names.
    """

    name: str
    version: str
    folder: Path
    is_editable: bool


def installed_copies(name: str) -> list[Installed]:
    """The copies of a package on the import path, in the order in which they are found; most often one or none."""
    found: dict[Path, Installed] = {}
    for distribution in distributions(name=name):
        source = _editable_source(distribution)
        folder = Path(str(distribution.locate_file(""))).resolve()
        version = distribution.version or "unknown"
        found.setdefault(folder, Installed(name, version, source or folder, source is not None))
    return list(found.values())


def versions() -> dict[str, dict[str, str]]:
    """Group -> package -> version, of those that are installed."""
    found = {
        group: {name: copies[0].version for name in packages if (copies := installed_copies(name))}
        for group, packages in PACKAGES.items()
    }
    return {group: names for group, names in found.items() if names}


def own_place() -> dict[str, Any]:
    """Which copy of littrainer this is."""
    folder = Path(littrainer.__file__).parent
    copies = installed_copies(OWN_NAME)
    return {
        "version": littrainer.__version__,
        "folder": str(folder),
        "editable": any(copy.is_editable and copy.folder in folder.parents for copy in copies),
        "installed": [f"{copy.version} in {copy.folder}" for copy in copies],
    }


def findings_about_ranges() -> Iterator[str]:
    """What is missing, or has a version that littrainer does not support, with what to do."""
    own = next(iter(distributions(name=OWN_NAME)), None)
    if own is None:
        yield (
            "littrainer has no package metadata here, so versions cannot be compared with what it supports: "
            "install it, instead of putting its source on PYTHONPATH."
        )
        return
    from packaging.requirements import Requirement

    for text in own.requires or []:
        requirement = Requirement(text)
        extra = _extra_of(str(requirement.marker or ""))
        if extra in EXTRAS_FOR_DEVELOPMENT or (
            requirement.marker and not requirement.marker.evaluate({"extra": extra})
        ):
            continue
        copies = installed_copies(requirement.name)
        wanted = f"pip install '{requirement.name}{requirement.specifier}'"
        if not copies and not extra:
            yield f"{requirement.name} is not installed, and littrainer needs it: {wanted}"
        elif copies and not requirement.specifier.contains(copies[0].version, prereleases=True):
            use = f"littrainer[{extra}]" if extra else "littrainer"
            yield f"{requirement.name} {copies[0].version} is outside what {use} supports: {wanted}"


def findings_about_copies() -> Iterator[str]:
    """Packages of which there are several copies, or in whose place Python would import something else."""
    names = {OWN_NAME: OWN_NAME, **{name: module for group in PACKAGES.values() for name, module in group.items()}}
    working_folder = os.getcwd()
    for name, module in names.items():
        copies = installed_copies(name)
        if len(copies) > 1:
            places = " and ".join(f"{copy.version} in {copy.folder}" for copy in copies)
            yield f"{name} is installed {len(copies)} times ({places}); the first counts: uninstall the other."
        if not copies:
            continue
        place = _folder_of_module(module)
        if place is None:
            yield (
                f"{name} {copies[0].version} is installed, but module {module} is not found: "
                f"pip install --force-reinstall --no-deps {name}=={copies[0].version}"
            )
        elif not any(copy.folder in (place, *place.parents) for copy in copies):
            yield (
                f"module {module} comes from {place}, and not from the installed {name} {copies[0].version} in "
                f"{copies[0].folder}: remove one of the two, or take the folder off PYTHONPATH."
            )
        beside = _folder_of_module(module, working_folder)
        if beside is not None and place != beside and not any(copy.folder == beside for copy in copies):
            yield (
                f"the working directory has a module {module} of its own ({beside}), which a script there imports in "
                f"place of {name}: rename it."
            )


def _folder_of_module(name: str, folder: str | None = None) -> Path | None:
    """Where a top-level module lies, or would lie in `folder`; None where there is none.

    Folders without an `__init__.py` do not count: a package elsewhere on the path comes before them.
    """
    if folder is not None:
        spec = PathFinder.find_spec(name, [folder])
    else:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
    if spec is None or spec.origin is None:
        # Parts of a namespace package, as azureml is.
        parts = list(spec.submodule_search_locations or ()) if spec is not None and folder is None else []
        return Path(parts[0]).resolve().parent if parts else None
    origin = Path(spec.origin).resolve()
    return origin.parent.parent if origin.stem == "__init__" else origin.parent


def _editable_source(distribution: Distribution) -> Path | None:
    """The source tree that an editable installation leads to."""
    try:
        note = json.loads(distribution.read_text(SOURCE_NOTE) or "{}")
    except ValueError:
        return None
    if not note.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(note["url"]).path)).resolve()


def _extra_of(marker: str) -> str:
    """The extra that a requirement belongs to; empty where it is always needed."""
    _, found, rest = marker.partition("extra ==")
    return rest.split()[0].strip("\"'") if found else ""
