"""Where a model is put that no cluster has a place for."""

from __future__ import annotations

import torch


def chosen(name: str | None) -> torch.device:
    """Return the device of this name; without one the first GPU, or the CPU where there is none.

    Raises: ValueError if there is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError("no device of torch; allowed: cpu, cuda, cuda:0 and so on") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError("no device that is known here; allowed: cpu, cuda, cuda:0 and so on")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"torch sees {torch.cuda.device_count()} GPUs; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    return device
