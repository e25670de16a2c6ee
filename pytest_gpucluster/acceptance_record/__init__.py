"""The acceptance record of a run: what was accepted, by which limits, of which parts, sealed by a digest."""
