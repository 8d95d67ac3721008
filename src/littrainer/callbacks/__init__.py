"""Callbacks, their state and control, and support for Lightning's callbacks."""
