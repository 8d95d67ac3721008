"""Callbacks, the state and control they are given, and the bridge from Lightning's hooks to Trainer events."""
