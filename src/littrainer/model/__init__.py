"""What is known about a model, and going through its modules."""
