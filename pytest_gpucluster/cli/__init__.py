"""The command ``gpucluster``: one command or group of commands a file. pytest imports none of it."""
