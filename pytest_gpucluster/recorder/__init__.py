"""The process that writes the record, and the client on rank 0."""
