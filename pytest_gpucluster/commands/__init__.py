"""What ``gpucluster`` can be told to do: one command a file, each with ``configure(parser)`` and ``run(options)``."""
