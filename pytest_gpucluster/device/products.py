"""Products of matrices: the plain and the scaled (fp8) call, and torch's switches for their arithmetic.

The switches hold for the process, whatever the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_gpucluster.device.environment import not_reproducible
from pytest_gpucluster.errors import EnvironmentBroken

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Write the product of the first two matrices to the third."""


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply two matrices of one dtype."""
    torch.mm(a, b, out=out)


def scaled_product(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]:
    """Return a function that multiplies two e4m3 matrices, unscaled, with fast accumulation: ``multiply(a, b, out)``.

    ``b`` must be column-major, ``out`` bf16, and all dimensions multiples of 16.
    Source: the doc of torch.nn.functional.scaled_mm; cuBLAS, 8-bit floating point data types.
    """
    one = torch.ones((), device=device)
    older: Any = getattr(torch, "_scaled_mm", None)
    if older is not None:
        # Preferred although it is private: it writes to a given matrix, so that elements that are not written show.
        def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> object:
            return older(a, b, one, one, out_dtype=out.dtype, use_fast_accum=True, out=out)

        return multiply

    public: Any = torch.nn.functional
    by_tensor = public.ScalingType.TensorWise

    def multiply_and_copy(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> object:
        # The copy counts as time of the product. derived: 5 % of it on an H100 at n = 16384, from 1.07 GB at
        # 3.35 TB/s and a product at 1400 TFLOPS.
        return out.copy_(
            public.scaled_mm(a, b, one, by_tensor, one, by_tensor, output_dtype=out.dtype, use_fast_accum=True)
        )

    return multiply_and_copy


@contextmanager
def numerics(float32_precision: str) -> Iterator[None]:
    """Set torch's switches for the arithmetic of products, and restore them.

    ``highest`` is true fp32, ``high`` allows TF32. Partial sums are kept in fp32: with less, the element by
    element bound would not hold, and a result would depend on how a library divides the work.
    """
    cuda = torch.backends.cuda.matmul
    cpu: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch makes it at run time
    try:
        old_precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        # Only the newer switches below were set, and torch does not report both by the older one.
        old_precision = "highest"
    precisions = cuda.fp32_precision, cpu.fp32_precision
    reductions = [
        (name, (getattr(cuda, name), getattr(cuda, f"{name}_split_k")))
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    ]
    fp16_accumulation = cuda.allow_fp16_accumulation
    try:
        torch.set_float32_matmul_precision(float32_precision)
        for name, (_, split_k) in reductions:
            setattr(cuda, name, (False, split_k))
        cuda.allow_fp16_accumulation = False
        yield
    finally:
        torch.set_float32_matmul_precision(old_precision)
        cuda.fp32_precision, cpu.fp32_precision = precisions
        for name, value in reductions:
            setattr(cuda, name, value)
        cuda.allow_fp16_accumulation = fp16_accumulation


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch choose only deterministic algorithms, and restore its switch.

    "error", not "warn": with a mere warning the backward of flash and memory-efficient attention stay as they are
    (Source: pytorch, aten/src/ATen/native/transformers/cuda/attention_backward.cu). Source of the switch:
    https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html.

    Raises: EnvironmentBroken where a GPU is in use and the environment keeps cuBLAS from it; see ``environment``.
    """
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if in_use and (problem := not_reproducible(os.environ)):
        raise EnvironmentBroken(problem)
    before = torch.get_deterministic_debug_mode()
    try:
        # As torch.use_deterministic_algorithms, but for compiled code, whose compiler it would import.
        torch.set_deterministic_debug_mode("error")
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
