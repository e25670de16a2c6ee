"""The state of a node: GPUs, host, network, scheduler, and the checks of each."""
