"""The process that writes the journal and the reports, and its client on rank 0."""
