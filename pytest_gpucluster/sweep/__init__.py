"""Many nodes: each one alone, all at once, then those that did not fail together."""
