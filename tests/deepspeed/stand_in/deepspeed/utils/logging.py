"""DeepSpeed's logger."""

from __future__ import annotations

import logging

logger = logging.getLogger("deepspeed stand-in")
