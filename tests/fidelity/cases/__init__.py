"""Scenarios, by topic. Importing `tests.fidelity.scenarios` registers them all."""
