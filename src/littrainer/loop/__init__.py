"""One training: how long it is, how its loss is formed, and what happens at each of its steps."""
