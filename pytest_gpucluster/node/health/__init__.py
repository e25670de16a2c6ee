"""The health of GPUs: checks, fault counters, and telemetry during a test."""
