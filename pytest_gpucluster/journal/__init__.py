"""The record of a run: journal.jsonl, its types, and the verdict."""
