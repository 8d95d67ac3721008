"""Uploading to the Hugging Face Hub, and the model card that goes with a model."""
