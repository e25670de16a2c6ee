"""Measurements: each takes a device or a process group and returns a frozen result with its samples.

Nothing in here imports pytest, and nothing in here decides whether a value is good enough.
"""
