"""Which node, GPU or link is the culprit: what to probe next, and what follows from the results. Pure."""
