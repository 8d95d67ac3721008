"""What the site's reader of docstrings has to be told of ours."""

from __future__ import annotations

import re
from typing import Any

import griffe

# `first, last: what both are for` among parameters and errors.
SEVERAL = re.compile(r"^( +)([\w.]+(?:, [\w.]+)+)(: .*(?:\n\1 +.*)*)", re.MULTILINE)
SECTION = re.compile(r"^(?P<indent> *)(?:Parameters|Raises):\n(?:(?P=indent) +.*\n?|\n)+", re.MULTILINE)


class OurDocstrings(griffe.Extension):
    """Splits a line that describes several parameters or errors; the fields of a NamedTuple are its parameters."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub(lambda found: _one_a_line(found[0]), obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if not any(str(base).rpartition(".")[2] == "NamedTuple" for base in cls.bases) or "__init__" in cls.members:
            return
        own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        fields = [
            griffe.Parameter(
                name, annotation=field.annotation, default=field.value, kind=griffe.ParameterKind.positional_or_keyword
            )
            for name, field in cls.attributes.items()
            if field.annotation is not None and "property" not in field.labels
        ]
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(own, *fields)))


def _one_a_line(section: str) -> str:
    return SEVERAL.sub(lambda found: "\n".join(f"{found[1]}{name}{found[3]}" for name in found[2].split(", ")), section)
