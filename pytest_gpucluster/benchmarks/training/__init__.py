"""One training step and what surrounds it: decoder, data, and the comparisons that show that a step is right."""
