"""Trials that several processes carry out together."""
