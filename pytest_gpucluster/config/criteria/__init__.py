"""What is accepted: each module declares criteria with their metrics, workload and time, and imports no torch."""
