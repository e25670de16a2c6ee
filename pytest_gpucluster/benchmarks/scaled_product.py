"""Products of fp8 matrices: torch's scaled products, by whichever name this torch has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_gpucluster.errors import EnvironmentBroken

CAPABILITY = (8, 9)
"""The first with fp8 tensor cores. Source: the message of torch._scaled_mm on older GPUs."""


def require_fp8(device: torch.device) -> None:
    """Make sure that a device multiplies fp8 matrices.

    Raises: EnvironmentBroken on a GPU that is too old: that is no fault of the GPU.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (CAPABILITY, torch.cuda.get_device_capability(device)))
        raise EnvironmentBroken(
            f"{device}: fp8 products need compute capability {needed} or later, and this GPU has {found}; leave fp8 out"
            " (-k 'not fp8'), or name the SKU with --gpucluster-sku"
        )


def scaled_product(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]:
    """Return what multiplies two e4m3 matrices, unscaled, with fast accumulation: ``multiply(a, b, out)``.

    ``b`` must be column-major, ``out`` bf16, and all dimensions multiples of 16.
    Source: the doc of torch.nn.functional.scaled_mm; cuBLAS, 8-bit floating point data types.
    """
    one = torch.ones((), device=device)
    older: Any = getattr(torch, "_scaled_mm", None)
    if older is not None:
        # Preferred although it is private: it writes to a given matrix, so that what a product failed to write shows.
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
