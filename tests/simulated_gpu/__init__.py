"""A simulated CUDA device for the CPU build of torch, and the tests that need a GPU; README.md says what it shows."""
