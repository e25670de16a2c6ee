"""The ranks of a run: launcher variables, host lists, and detached processes that outlive a rank."""
