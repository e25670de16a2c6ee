"""The device of a benchmark's test: the back end of the CPU with parts of the test's own."""

from contextlib import contextmanager
from unittest.mock import patch

import torch

from pytest_gpucluster.device.backends import BACKENDS


@contextmanager
def device_of(by, place="cpu"):
    """Let ``by`` be the back end of all devices of this type."""
    with patch.dict(BACKENDS, {place: lambda device: by}):
        yield by


def device_with(place="cpu", **parts):
    """Let the back end have these methods in place of its own: a clock, a product, the size of the cache."""
    by = BACKENDS[place](torch.device(place))
    for name, part in parts.items():
        setattr(by, name, part)
    return device_of(by, place)


def timed_by(clock, **parts):
    """As ``device_with``, where the clock of these tests takes the time, and tells how much has passed."""
    return device_with(clock=lambda: clock, now=lambda: clock.now_seconds, **parts)
