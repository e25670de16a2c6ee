"""What a node is doing right now: its GPUs, ports, processes and load, read by a process of its own."""
