"""Floors proposed from accepted runs, for people to review: what was measured, the rule, and the file."""
