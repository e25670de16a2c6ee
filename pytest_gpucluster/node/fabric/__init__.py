"""The network of a node: ports, the variables of NCCL, and what NCCL chose."""
