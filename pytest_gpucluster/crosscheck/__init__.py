"""Our figures beside those that another program has measured on the same GPUs."""
