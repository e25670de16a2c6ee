"""All that depends on the accelerator: clock, streams, memory, timed operations, identity, groups, environment.

No other package names ``torch.cuda``, ``torch.backends.cuda`` or NCCL's part of torch.
"""
