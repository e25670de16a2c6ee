"""Checkpoints and shared file systems: whether what is written can be read, everywhere, and how fast."""
