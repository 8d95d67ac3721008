"""Facts about a model, and traversals of its modules."""
