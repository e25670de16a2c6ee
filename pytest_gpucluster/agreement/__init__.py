"""How N ranks agree on one outcome for each phase of a test, whatever happens to any of them."""
