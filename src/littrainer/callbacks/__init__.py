"""Callbacks, the state and control that they are given, and which of Lightning's callbacks work."""
