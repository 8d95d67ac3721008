"""What littrainer costs, beside transformers, plain Lightning and a raw PyTorch loop: `python -m benchmarks`.

`measured/` holds one file for each benchmark; `catalogue.py` lists them. Each side runs in a process of its own
(`processes.py`, `side_process.py`), the sides take turns (`rounds.py`), what they measure goes into one JSON file
(`record.py`), and from that file tables (`tables.py`) and curves (`growth.py`) are written into the documentation.
"""
