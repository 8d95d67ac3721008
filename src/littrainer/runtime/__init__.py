"""Utilities of all packages: notes, tracebacks, logs, atomic files, seeds and lazy isinstance."""
