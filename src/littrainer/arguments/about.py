"""How one argument describes itself."""

from __future__ import annotations

from typing import Any


def about(help: str, **parser_options: Any) -> dict[str, Any]:
    """Metadata of a field: one line of help, which command-line parsers and the documentation read.

    Parameters:
        help: one line that says what the argument does, with its unit.
        parser_options: what a command-line parser needs besides, such as `choices`, `nargs` or `const`.
    """
    return {"help": help, **parser_options}
