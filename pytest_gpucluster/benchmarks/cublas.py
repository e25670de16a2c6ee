"""cuBLAS' workspace: what must be in the environment for it to give the same bits again."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

NAME = "CUBLAS_WORKSPACE_CONFIG"
REPRODUCIBLE = (":4096:8", ":16:8")
"""With either of them it does. Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility."""


def prepare(environment: MutableMapping[str, str]) -> None:
    """Choose such a workspace, unless the operator has chosen any.

    It must be there before the first product on a GPU: torch looks once, at that product, whether it is asked for the
    same bits or not (Source: pytorch, aten/src/ATen/Context.cpp, alertCuBLASConfigNotDeterministic). On Hopper it is as
    large as what torch takes by default, 32 MiB, and on older GPUs larger, so that no product gets slower (Source:
    pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize).
    """
    environment.setdefault(NAME, REPRODUCIBLE[0])


def hindrance(environment: Mapping[str, str]) -> str:
    """Say why this environment does not let cuBLAS give the same bits again: "" if it does."""
    found = environment.get(NAME)
    if found in REPRODUCIBLE:
        return ""
    allowed = " or ".join(REPRODUCIBLE)
    return (
        f"{NAME} is {found!r}, and only with {allowed} does cuBLAS give the same bits again: unset it, or set {allowed}"
    )
