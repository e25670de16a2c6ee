"""What a node is: CPUs, memory, GPUs and what connects them, network, driver stack, mounts, scheduler.

Each part is plain JSON types. What is not there is null, and ``not_available`` beside it says why.
"""
