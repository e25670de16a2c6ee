"""Computing the same bits twice from the same numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch choose only algorithms that give the same bits again, and put its switch back.

    cuBLAS does so if its workspace is one of two; torch refuses to multiply on a GPU as long as the environment names
    neither. Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility and
    https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html.
    """
    before = torch.get_deterministic_debug_mode()
    workspace = os.environ.get(_WORKSPACE)
    if workspace not in (":4096:8", ":16:8"):
        os.environ[_WORKSPACE] = ":4096:8"
    try:
        # What torch.use_deterministic_algorithms does, but for compiled code, whose compiler it would import.
        torch.set_deterministic_debug_mode("error")
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = workspace
