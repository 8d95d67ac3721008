"""Searches with Ray Tune: what the script's process does, and what the trial's does."""
