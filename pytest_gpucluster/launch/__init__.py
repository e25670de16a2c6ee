"""The ranks of a run: launcher variables, lists of hosts, and detached processes that outlive a rank."""
