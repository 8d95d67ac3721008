"""Checks of a whole run before it is paid for: its rows, its longest batch, an evaluation, a save, a resume."""
