"""Writes the section on names: `python -m littrainer.compat.documentation docs/compatibility.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from littrainer.compat.names import REPLACED
from littrainer.compat.neighbours import LEFT_TO_TRANSFORMERS, MISSING_IN, RELEASES

HEADING = "## Names answered"

INTRODUCTION = f"""\
Under `littrainer run`, and after `import littrainer.auto`, each name of the first table means littrainer's, however a
script or a library reaches it: from `transformers` itself, from the module, or through another module that imports it.
The tests go through both tables with transformers {" and ".join(RELEASES)}: every public name that these modules define
in either release stands in one of them, can be imported under the redirection from the release that has it, and what
littrainer answers takes the parameters of both.

A name that one of the releases lacks is marked; littrainer's are there under each release.
"""

LEFT_INTRODUCTION = """\
These stay transformers' own. They know nothing of the Trainer, or work with littrainer's classes as with their own:
`get_scheduler` takes littrainer's `SchedulerType`, `nested_gather` the tensors of littrainer's processes, and callbacks
derive from littrainer's `TrainerCallback`.
"""


def section() -> str:
    """The section as Markdown, from its heading on, ending with a newline."""
    ours = {module: sorted(names) for module, names in sorted(REPLACED.items())}
    left = {module: sorted(names) for module, names in sorted(LEFT_TO_TRANSFORMERS.items()) if names}
    return "\n".join(
        [
            f"{HEADING}\n",
            INTRODUCTION,
            *_table("littrainer's", ours),
            "",
            LEFT_INTRODUCTION,
            *_table("transformers' own", left),
            "",
        ]
    )


def _table(heading: str, names: dict[str, list[str]]) -> Iterator[str]:
    yield f"| module | {heading} |"
    yield "| --- | --- |"
    for module, listed in names.items():
        yield f"| `{module}` | {', '.join(_marked(module, name) for name in listed)} |"


def _marked(module: str, name: str) -> str:
    having = [release for release in RELEASES if name not in MISSING_IN[release].get(module, ())]
    if len(having) == len(RELEASES):
        return f"`{name}`"
    return f"`{name}` ({', '.join(having) or 'transformers 4'})"


def with_section(page: str) -> str:
    """A page with this section in the place of the one that it has.

    Raises:
        ValueError: the page has no such heading.
    """
    if f"{HEADING}\n" not in page:
        raise ValueError(f"the page has no heading {HEADING!r}")
    before, _, rest = page.partition(f"{HEADING}\n")
    _, following, after = rest.partition("\n## ")
    return f"{before}{section()}{following}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_section(path.read_text(encoding="utf-8")), encoding="utf-8")
