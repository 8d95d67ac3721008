"""Lightning strategies as a Trainer needs them, and which one the arguments ask for."""
