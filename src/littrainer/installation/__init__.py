"""What is installed on this machine, and what of it matters to a training: `littrainer env`."""
