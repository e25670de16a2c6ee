"""The ranks of a run: what the launcher says of each, lists of hosts, and processes that outlive a rank."""
