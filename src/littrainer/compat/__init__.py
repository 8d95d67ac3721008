"""What lets code written against transformers run on littrainer unchanged."""
