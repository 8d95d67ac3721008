"""This group needs libraries that the development environment does not have: `make test-libraries` runs it."""

from __future__ import annotations

import os

VARIABLE = "LITTRAINER_TEST_LIBRARIES"
"""Set by `make test-libraries`, whose environment has them."""

collect_ignore_glob = [] if os.environ.get(VARIABLE) else ["test_*.py"]
