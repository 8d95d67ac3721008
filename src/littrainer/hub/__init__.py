"""Uploads to the Hugging Face Hub, and model cards."""
