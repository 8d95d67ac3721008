"""Writes docs/samples/report.html, and pictures of it, from the training recorded in docs/samples/text_classification.

`make docs-sample` runs this. To record the training again, run `littrainer run examples/text_classification.py` and
copy trainer_state.json, littrainer_run.json and config.json from its folder.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

from littrainer.cli import main

DOCS = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT = 1200, 860
# A preference of the reader that Chromium's command line can set.
LOOKS = {"light": "1", "dark": "0"}


def take_pictures(page: Path) -> None:
    """Show the page in headless Chromium, in light and in dark colours."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("The pictures need Chromium; the page is written.")
    for look, scheme in LOOKS.items():
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / "page.png"
            subprocess.run(
                [
                    *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                    *(f"--user-data-dir={folder}", f"--blink-settings=preferredColorScheme={scheme}"),
                    *(f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", page.as_uri()),
                ],
                check=True,
                capture_output=True,
            )
            image = Image.open(io.BytesIO(picture.read_bytes())).convert("RGB")
        # Few colours make a small file.
        image.quantize(128).save(DOCS / "images" / f"report-{look}.png", optimize=True)


if __name__ == "__main__":
    sample = DOCS / "samples" / "report.html"
    # Not where `make demo` may have left the checkpoint that the sample names.
    os.chdir(sample.parent)
    main(["report", "text_classification", "-o", str(sample), "--no-png"])
    take_pictures(sample)
