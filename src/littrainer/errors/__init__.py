"""What errors of a script are told with: the batch, what to do, and tracebacks without internal calls."""
