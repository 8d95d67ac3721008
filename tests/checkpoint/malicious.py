"""Content of a malicious checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Creates:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))
