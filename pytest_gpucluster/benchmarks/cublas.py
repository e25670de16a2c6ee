"""cuBLAS' workspace: the environment that makes its results reproducible."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

NAME = "CUBLAS_WORKSPACE_CONFIG"
REPRODUCIBLE = (":4096:8", ":16:8")
"""Settings that do. Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility."""


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set a reproducible workspace, unless the operator has set any.

    It must be set before the first product on a GPU: torch checks once, at that product, whether reproducibility is
    required (Source: pytorch, aten/src/ATen/Context.cpp, alertCuBLASConfigNotDeterministic). On Hopper it is as
    large as torch's default, 32 MiB, and on older GPUs larger, so that no product gets slower (Source:
    pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize).
    """
    environment.setdefault(NAME, REPRODUCIBLE[0])


def not_reproducible(environment: Mapping[str, str]) -> str:
    """Return why cuBLAS is not reproducible in this environment: "" if it is."""
    found = environment.get(NAME)
    if found in REPRODUCIBLE:
        return ""
    allowed = " or ".join(REPRODUCIBLE)
    return f"{NAME} is {found!r}, and cuBLAS is reproducible only with {allowed}: unset it, or set {allowed}"
