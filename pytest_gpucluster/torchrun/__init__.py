"""torchrun started in the operator's place: its command line, its agent, and what came of it."""
