"""What the suites share: this rank, a collective, and stamps that tell the test outside what happened when."""

import os
import time
from pathlib import Path

RANK = int(os.environ.get("RANK", "0"))


def stamp(name):
    """Write down when a fault is made, or what comes after it: name, wall-clock time and process."""
    with Path(os.environ["STAMPS"], f"rank{RANK}.txt").open("a") as file:
        file.write(f"{name} {time.time()} {os.getpid()}\n")


def all_reduce(cluster, elements=4):
    """Sum ones over all ranks."""
    import torch

    tensor = torch.ones(elements)
    torch.distributed.all_reduce(tensor, group=cluster.group)
    return tensor


def meet(cluster, fault):
    """Show that all ranks are together again after a fault."""
    assert all_reduce(cluster).tolist() == [cluster.world_size] * 4
    stamp(f"after_{fault}")


def then_meet(test):
    """Follow ``test_FAULT`` with ``test_after_FAULT``, which needs all ranks."""
    fault = test.__name__.removeprefix("test_")

    def after(cluster):
        meet(cluster, fault)

    module = test.__globals__
    module[test.__name__] = test
    module[f"test_after_{fault}"] = after
    return test
