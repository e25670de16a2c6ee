"""Nodes reached over ssh: who they are, what is asked of them, and what runs there as long as somebody listens."""
