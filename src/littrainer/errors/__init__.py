"""What all packages share at the bottom: notes, tracebacks and logs, atomic files, seeds, lazy isinstance."""
