"""torch.compile for the blocks of a decoder, and whether there is a compiler at all."""

from __future__ import annotations

import importlib
import os
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from pytest_gpucluster.benchmarks.training.decoder import Decoder

_TRIED_ELEMENTS = 8


def missing_compiler(device: torch.device) -> str:
    """Say why torch.compile does not work for a device: "" if it does. Compiles, runs and checks a small function.

    For a GPU it needs triton, and a C compiler for what launches triton's kernels; for the CPU a C++ compiler. Source:
    torch.compile's documentation, "torch.compile Troubleshooting".
    """
    given = torch.arange(_TRIED_ELEMENTS, dtype=torch.float32, device=device)
    try:
        with fresh_compiler():
            found = torch.compile(_tried, fullgraph=True, dynamic=False)(given)
    # All that a missing or broken compiler raises: RuntimeErrors of torch's own, what the start of a process raises or
    # its exit code (triton calls a C compiler by itself), and an import of triton that fails.
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {_told(str(error))}"
    if not torch.equal(found, _tried(given)):
        return f"what it compiles is wrong: {found.tolist()}, expected {_tried(given).tolist()}"
    return ""


def compile_blocks(model: Decoder) -> None:
    """Let each block of a decoder be compiled when it first runs; to be called before the blocks are sharded.

    Compiled by block, not as a whole, all blocks share one compiled function, and the ranks share gradients of one
    block while the next one computes. Source: pytorch/torchtitan, which compiles so.
    """
    for block in model.blocks:
        # With fullgraph what cannot be compiled is an error, not a silent return to Python.
        block.compile(fullgraph=True, dynamic=False)


def compile_failed(error: BaseException) -> str:
    """Say in a line what the compiler had against a model: "" if the error is none of the compiler's."""
    if not isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return ""
    return f"{type(error).__name__}: {_told(str(error))}"


@contextmanager
def fresh_compiler(*, repeatable: bool = False) -> Iterator[None]:
    """Forget what was compiled before, and afterwards what was compiled inside.

    torch keeps a limited number of versions of each function, and holds what those refer to.

    Args:
        repeatable: let what is compiled a second time give the same bits. By default the compiler measures which way of
            summing is faster, and the next time another one may win.
    """
    torch._dynamo.reset()
    try:
        # Blocks are the pieces already: cutting them further at the ends of DDP's buckets gains nothing, and cannot be
        # done where they are recomputed.
        with torch._dynamo.config.patch(optimize_ddp=False), _unmeasured(repeatable), warnings.catch_warnings():
            # The compiler warns of what torch does itself. Where warnings are errors, that would look like no compiler.
            warnings.filterwarnings("ignore", module=r"torch\.")
            yield
    finally:
        torch._dynamo.reset()


def _unmeasured(wanted: bool) -> AbstractContextManager[object]:
    """Keep the compiler from measuring what changes numbers. Source: "deterministic" of torch/_inductor/config.py."""
    if not wanted:
        return nullcontext()
    inductor: Any = importlib.import_module("torch._inductor.config")  # slow, so only where something is compiled
    return inductor.patch(deterministic=True) if hasattr(inductor, "deterministic") else nullcontext()


def _tried(given: torch.Tensor) -> torch.Tensor:
    return given * 3 + 1


def _told(text: str) -> str:
    """Return the first line that says something: some of torch's errors begin with one that announces the next."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().endswith("raised:")]
    return (lines[0] if lines else "no reason given").replace(os.path.expanduser("~"), "~")[:200]
