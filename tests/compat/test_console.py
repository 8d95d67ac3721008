from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.compat.console import CONFIGURATIONS, OURS, THEIRS

# What is not the same in two runs of one script: times, speeds, the place of a message in the code.
TIMES = (
    (r"\d{4}-\d\d-\d\d [\d:,]+ >>", "TIME >>"),
    (r"\|\w+\.py:\d+\]", "|FILE:LINE]"),
    (r"(_runtime|_per_second)': '[\d.e+-]+'", r"\1': TIME"),
    (r"\[[\d:]+<[\d:?]+, *[\d.?]+(it/s|s/it)\]", "[TIME]"),
)
# transformers' alone: a step of its arguments', that two of its checkpoints were written in the same second, and a bar
# over the files of each save.
ITS_OWN = re.compile(r".*(PyTorch: setting up devices|mtime may not be reliable).*\n|(\n?Writing model shards:.*)+\n")


def shown(folder: Path) -> dict[str, str]:
    texts = {
        path.name: path.read_text() for name in CONFIGURATIONS for path in folder.glob(f"{name}.???") if path.is_file()
    }
    for name in texts:
        for pattern, stands_for in TIMES:
            texts[name] = re.sub(pattern, stands_for, texts[name])
        texts[name] = ITS_OWN.sub("", texts[name])
    return texts


def test_a_script_shows_the_lines_that_it_shows_with_transformers_however_logging_is_configured(tmp_path: Path) -> None:
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
    theirs, ours = (shown(folder) for folder in folders.values())
    assert len(theirs) == 2 * len(CONFIGURATIONS)
    assert "Training completed" in theirs["verbosity_info.err"] and "Training completed" not in theirs["nothing.err"]
    for name, text in theirs.items():
        assert ours[name].splitlines() == text.splitlines(), name
