"""Limits and verdicts on values: the limits file, published evidence, and the judge, once, for all ranks."""
