"""The workload file: which sizes, shapes and times are measured, and how each value is written."""
