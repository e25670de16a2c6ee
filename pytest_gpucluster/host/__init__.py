"""What the node lets its ranks do: limits, memory, CPUs, NUMA, IOMMU. Read from /proc and /sys, without torch."""
