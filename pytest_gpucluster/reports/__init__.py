"""Renderings of a journal: pure functions, without torch and without pytest."""
