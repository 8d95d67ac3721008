from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.compat.console import CONFIGURATIONS, OURS, THEIRS

# Patterns of times, speeds and code positions, which differ between runs.
VARYING = (
    (r"\d{4}-\d\d-\d\d [\d:,]+ >>", "TIME >>"),
    (r"\|\w+\.py:\d+\]", "|FILE:LINE]"),
    (r"(_runtime|_per_second)': '[\d.e+-]+'", r"\1': TIME"),
    (r"\[[\d:]+<[\d:?]+, *[\d.?]+(it/s|s/it)\]", "[TIME]"),
)
# Messages of transformers only.
ONLY_THEIRS = re.compile(
    r".*(PyTorch: setting up devices|mtime may not be reliable).*\n|(\n?Writing model shards:.*)+\n"
)


def read_outputs(folder: Path) -> dict[str, str]:
    texts = {
        path.name: path.read_text() for name in CONFIGURATIONS for path in folder.glob(f"{name}.???") if path.is_file()
    }
    for name in texts:
        for pattern, replacement in VARYING:
            texts[name] = re.sub(pattern, replacement, texts[name])
        texts[name] = ONLY_THEIRS.sub("", texts[name])
    return texts


def test_a_script_prints_the_same_lines_as_with_transformers_in_each_logging_configuration(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    for name in ("TRANSFORMERS_VERBOSITY", "CI"):
        environment.pop(name, None)
    folders = {side: tmp_path / side.replace(" ", "_") for side in (THEIRS, OURS)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.compat.console", side, str(folder)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for side, folder in folders.items()
    ]  # fmt: skip
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    theirs, ours = (read_outputs(folder) for folder in folders.values())
    assert len(theirs) == 2 * len(CONFIGURATIONS)
    assert "Training completed" in theirs["verbosity_info.err"] and "Training completed" not in theirs["nothing.err"]
    for name, text in theirs.items():
        assert ours[name].splitlines() == text.splitlines(), name
