"""This group needs libraries that the development environment does not have: `make test-libraries` runs it."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "LITTRAINER_TEST_LIBRARIES"
"""Set by `make test-libraries`, whose environment has them."""
NEEDS_NONE = "test_sides.py"
"""The tests of the comparison itself, which are part of `make test` too."""

collect_ignore = (
    []
    if os.environ.get(VARIABLE)
    else [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != NEEDS_NONE]
)
