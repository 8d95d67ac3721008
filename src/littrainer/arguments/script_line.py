"""Which line a warning about an argument points at: the one of the script that gave it."""

from __future__ import annotations

import enum
import os
import sys
from types import FrameType

PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# Constructors of dataclasses, enumerations that look for what a text means, and parsers that ask them.
BETWEEN = frozenset({"<string>", enum.__file__, os.path.join(os.path.dirname(os.__file__), "argparse.py")})


def stacklevel_of_script() -> int:
    """`stacklevel` for a `warnings.warn` in the function that calls this: how far away the first frame is that is not
    this package's; 1 where there is none."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in BETWEEN and not name.startswith(PACKAGE_FOLDER):
            return level
        frame = frame.f_back
        level += 1
    return 1
