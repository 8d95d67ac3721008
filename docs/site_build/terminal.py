"""Draws what a terminal shows of the quick start: `python docs/site_build/terminal.py` writes docs/images/terminal.svg.

The page's script is trained in a terminal, and what is on the screen at the end becomes text in a picture, which is
dark on every page. The middle is left out.
"""

from __future__ import annotations

import html
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quick-start.md"
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COMMAND = "littrainer run first.py runs/first"
COLUMNS = 100
FIRST, LAST = 3, 7
"""How many lines are kept of the beginning and of the end."""
LETTER, LINE, EDGE = 9.0, 20.0, 22.0
SEQUENCE = re.compile(r"\x1b\[(\d*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)|\x1b.")


def shown_by(command: str, folder: Path) -> str:
    """What a command writes to a terminal.

    Raises:
        SystemExit: the command failed.
    """
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    subprocess.run(["stty", "cols", str(COLUMNS), "rows", "50"], stdin=slave, check=True)
    running = subprocess.Popen(command.split(), cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    written = b""
    while True:
        try:
            read = os.read(master, 65536)
        except OSError:
            # Linux says so when the last process has closed the terminal.
            break
        if not read:
            break
        written += read
    os.close(master)
    if running.wait() != 0:
        raise SystemExit(f"{command} ended with status {running.returncode}:\n{written.decode()}")
    return written.decode()


def screen(written: str) -> list[str]:
    """The lines that are left of what was written: carriage returns and movements of the cursor overwrite."""
    lines = [""]
    row = column = 0
    for number, order, ends, text in SEQUENCE.findall(written):
        if order == "A":
            row = max(row - int(number or 1), 0)
        elif order == "K":
            lines[row] = lines[row][:column]
        elif ends == "\r":
            column = 0
        elif ends == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif text:
            before = lines[row].ljust(column)
            lines[row] = before[:column] + text + before[column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]


def picture(lines: list[str]) -> str:
    """The lines as text in an SVG, the command in another colour."""
    width, height = 2 * EDGE + COLUMNS * LETTER, 2 * EDGE + len(lines) * LINE + 18
    rows = [
        f'<text class="{"command" if line.startswith("$ ") else "output"}" x="{EDGE:g}" '
        f'y="{EDGE + 18 + (number + 0.75) * LINE:g}">{html.escape(line)}</text>'
        for number, line in enumerate(lines)
    ]
    said = html.escape("; ".join(line.strip() for line in lines))
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="title said">
  <title id="title">A terminal in which {html.escape(COMMAND)} has trained a model</title>
  <desc id="said">{said}</desc>
  <style>
    text {{ font: 15px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d6dce3;
      white-space: pre }}
    .command {{ fill: #7ee2a8; font-weight: 600 }}
  </style>
  <rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="10" fill="#161b22" stroke="#3d444d"/>
  <g fill="#57606a"><circle cx="22" cy="20" r="6"/><circle cx="42" cy="20" r="6"/><circle cx="62" cy="20" r="6"/></g>
  {(chr(10) + "  ").join(rows)}
</svg>
"""


def main() -> None:
    (script,) = re.findall(r'```python title="first.py"\n(.*?)```', PAGE.read_text("utf-8"), re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "first.py").write_text(script, "utf-8")
        lines = [line for line in screen(shown_by(COMMAND, Path(folder))) if line]
    # A log may take two lines, of which the second one is indented.
    end = next(index for index in range(len(lines) - LAST, len(lines)) if not lines[index].startswith(" "))
    PICTURE.write_text(picture([f"$ {COMMAND}", *lines[:FIRST], "...", *lines[end:]]), "utf-8")
    print("\n".join(lines), file=sys.stderr)


if __name__ == "__main__":
    main()
