"""What is measured: metrics and their units, single measurements, statistics, and when to stop sampling. Pure."""
