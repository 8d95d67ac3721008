"""The commands of `littrainer`."""
