"""Which node, GPU or link is the culprit: what to probe next, and what follows from what was seen. Pure."""
