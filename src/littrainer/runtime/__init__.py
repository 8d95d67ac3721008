"""Parts that all packages share: notes, tracebacks and logs, atomic files, seeds, lazy isinstance."""
