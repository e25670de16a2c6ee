"""What the product assumes of a node's GPUs, torch, NCCL and NVML, tried on the node itself: no verdict."""
