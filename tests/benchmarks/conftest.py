"""Products of these tests are so small that further threads only wait for each other."""

import gc

import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def frozen():
    """Let the collections in a test look through its own objects only: through torch and peft they take 0.3 s each."""
    gc.collect(1)
    gc.freeze()


@pytest.fixture
def group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    gc.collect()
    dist.destroy_process_group()


@pytest.fixture
def alone(group):
    return group
