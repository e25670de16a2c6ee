"""What a benchmark leaves behind in device memory: nothing."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def memory_returned() -> Iterator[None]:
    """Give the memory of what is called inside back to the device, whether it returns or raises.

    torch's allocator would keep it, and NCCL, which allocates for itself, would run out of memory later. The
    tensors must belong to a function called inside: those of the caller are still in use.
    """
    try:
        yield
    except BaseException as error:
        # A report keeps the traceback, the traceback its frames, and the frames gigabytes of tensors.
        traceback.clear_frames(error.__traceback__)
        with suppress(RuntimeError):  # on a lost device this fails as well, and must not hide why
            torch.cuda.empty_cache()
        raise
    # Does nothing where CUDA was never used.
    torch.cuda.empty_cache()
