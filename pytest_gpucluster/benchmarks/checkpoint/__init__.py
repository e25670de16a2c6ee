"""Checkpoints of a training: how they are stored, whether training goes on from them as if nothing had happened, and
how fast the file system takes and gives them."""
