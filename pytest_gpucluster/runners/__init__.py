"""Programs that start runs: torchrun, ssh, Slurm, Kubernetes, and sweeps of single nodes."""
