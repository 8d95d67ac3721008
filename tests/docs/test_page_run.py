"""Pages whose code fails, or that say what is not so, fail; commands are carried out as a shell would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of, pages
from tests.docs.forks import Forks
from tests.docs.page_run import run_page

PAGE = """
# A page

```python title="script.py"
import sys

from transformers import TrainingArguments

print("in", TrainingArguments.__module__, sys.argv[1:])
```

```console
$ littrainer run script.py \\
    --learning_rate 0.1
in littrainer.arguments.training_arguments ['--learning_rate', '0.5']
```

- In a list:

  ```python
  numbers = [1, 2]
  print(sum(numbers))  # 3: both
  ```

```
3
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "GUIDE.md").write_text(PAGE)
    return root / "GUIDE.md"


def collect_messages(page: Path, forks: Forks) -> str | None:
    """Return what is printed if the page fails, else None."""
    folder = page.parent.parent / "work"
    folder.mkdir(exist_ok=True)
    log = page.parent.parent / "log"
    log.unlink(missing_ok=True)
    status = forks.run(
        run_page, page.name, str(page.parent), str(log), folder=str(folder), environment=dict(os.environ), log=str(log)
    )
    return log.read_text() if status else None


def test_a_page_that_is_true_passes(page: Path, forks: Forks) -> None:
    assert collect_messages(page, forks) is None


@pytest.mark.parametrize(
    ("true", "untrue", "messages"),
    [
        ("sum(numbers)", "sum(number)", "NameError"),
        ("# 3: both", "# 4: both", "GUIDE.md:22: `print(sum(numbers))  # 4: both` prints '3'"),
        ("```\n3\n```", "```\nthree\n```", "GUIDE.md:26: nothing above prints 'three'"),
        ("in littrainer.arguments", "in transformers", "GUIDE.md:13: nothing above prints"),
        ("```python\n  numbers", "```ruby\n  numbers", "GUIDE.md:21: nothing is known about how to execute a block"),
        ("littrainer run script.py", "pip install 'littrainer[nothing]'", "pyproject.toml has no extra nothing"),
    ],
)
def test_a_wrong_page_is_reported_with_the_line(
    true: str, untrue: str, messages: str, page: Path, forks: Forks
) -> None:
    assert true in PAGE
    page.write_text(PAGE.replace(true, untrue))
    assert messages in (collect_messages(page, forks) or "")


def test_a_script_that_no_command_runs_is_run(page: Path, forks: Forks) -> None:
    page.write_text('```python title="script.py"\nraise SystemExit("it ran")\n```\n')
    assert "it ran" in (collect_messages(page, forks) or "")


def test_indented_blocks_of_pages_are_collected(page: Path) -> None:
    below = page.parent / "docs" / "more"
    below.mkdir(parents=True)
    (below / "new.md").write_text("````text\n```\nno fence\n```\n````\n")
    assert pages(page.parent) == ["GUIDE.md", "docs/more/new.md"]
    (text,) = blocks_of("docs/more/new.md", page.parent)
    assert text.code == "```\nno fence\n```\n"
    languages = [(block.language, block.title) for block in blocks_of("GUIDE.md", page.parent)]
    assert languages == [("python", "script.py"), ("console", None), ("python", None), ("text", None)]
