"""Computing the same bits twice from the same numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pytest_gpucluster import cublas
from pytest_gpucluster.errors import EnvironmentBroken


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch choose only algorithms that give the same bits again, and put its switch back.

    "error", not "warn": with a mere warning the backward of flash and memory-efficient attention stay as they are
    (Source: pytorch, aten/src/ATen/native/transformers/cuda/attention_backward.cu). Source of the switch:
    https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html.

    Raises: EnvironmentBroken where a GPU is in use and the environment keeps cuBLAS from it; see ``cublas.prepare``.
    """
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if in_use and (hindrance := cublas.hindrance(os.environ)):
        raise EnvironmentBroken(hindrance)
    before = torch.get_deterministic_debug_mode()
    try:
        # What torch.use_deterministic_algorithms does, but for compiled code, whose compiler it would import.
        torch.set_deterministic_debug_mode("error")
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
