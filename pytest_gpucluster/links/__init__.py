"""Every link between two GPUs, each for itself: who is paired when, what came of it, and what explains it. Pure."""
