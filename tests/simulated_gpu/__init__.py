"""A simulated CUDA device for the CPU build of torch, and the tests that need one; README.md says what it shows."""
