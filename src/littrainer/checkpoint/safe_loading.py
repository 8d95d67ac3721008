"""Loading of a checkpoint's files, which runs no code in them and reads no files outside of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

FORBIDDEN_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
OTHER_CHECKPOINT = "Resume from another checkpoint."
COULD_RUN_CODE = "could run code while it is loaded. Nothing of it has run. Use a checkpoint whose origin you trust."


def load_tensors(path: Path, allowed: Sequence[Any] = ()) -> Any:
    """Load a file of `torch.save` to the CPU: tensors, numbers, texts and containers of them.

    Parameters:
        allowed: further classes and functions.

    Raises:
        ValueError: the file is damaged, or names another class; no code of it has run.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    # A damaged file raises many kinds of errors, OSError among them.
    except Exception as error:
        forbidden = FORBIDDEN_GLOBAL.search(str(error))
        if forbidden is not None:
            named = f"{forbidden.group(1)}, which is neither tensor, number nor text and"
            raise ValueError(f"{path} is refused: it names {named} {COULD_RUN_CODE}") from error
        raise ValueError(f"{path} is damaged: {_first_line(error)}. {OTHER_CHECKPOINT}") from None


def refuse_unsafe(path: Path, advice: str) -> None:
    """Delete a file that `load_tensors` would refuse, and raise a ValueError."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        forbidden = FORBIDDEN_GLOBAL.search(str(error))
        path.unlink()
        raise ValueError(
            f"The checkpoint is not written: {path.name} would hold something that could not be loaded safely"
            f"{f' ({forbidden.group(1)})' if forbidden else ''}. {advice}"
        ) from error


def load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {_first_line(error)}. {OTHER_CHECKPOINT}") from None


def resolve_inside(folder: Path, name: Any, named_by: Path) -> Path:
    """Return a path in an index, or raise a ValueError if it is outside of the folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or "\\" in name or Path(name).name != name:
        raise ValueError(f"{named_by} is refused: it names {name!r}, which is not a file in its own folder.")
    target, home = (folder / name).resolve(), folder.resolve()
    # A download of huggingface_hub has links from snapshots/ to blobs/.
    in_download = target.parent.name == "blobs" and target.parent.parent in home.parents
    if home not in target.parents and not in_download:
        raise ValueError(f"{named_by} is refused: it names {name!r}, a link to {target}, outside its own folder.")
    return folder / name


def _first_line(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "it is empty or ends too early"
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
