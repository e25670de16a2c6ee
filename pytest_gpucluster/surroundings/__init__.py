"""What surrounds the GPUs of a job: the hosts' network, clocks and names, the scheduler, what others have left behind.

``notice`` makes findings about a host and raises them. Nothing here needs a process group: hosts tell each other over
``agreement.board``.
"""
