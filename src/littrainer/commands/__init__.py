"""The commands that have no room of their own, and what all commands share."""
