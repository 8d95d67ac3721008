"""Settings for every test: no network, one thread, and no progress bars of tokenizers across processes."""

from __future__ import annotations

import os

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# Before torch, transformers or datasets is imported, since they read these when they are imported.
for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)
