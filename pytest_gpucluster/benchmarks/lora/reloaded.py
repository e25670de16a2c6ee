"""What was saved, read again into a model made anew: as whoever uses the adapters will do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pytest_gpucluster.benchmarks.lora.judged_loss import JudgedLoss
from pytest_gpucluster.benchmarks.lora.model import DTYPES, Base, first_line, make_base
from pytest_gpucluster.benchmarks.lora.packing import Packed
from pytest_gpucluster.benchmarks.ranks import Ranks
from pytest_gpucluster.errors import WrongResult


def reload(base: Base, final: Path, device: torch.device, *, precision: str, seed: int) -> Any:
    """Return peft's model of a base with the adapters of a folder, whole on this rank, to be used and not trained.

    All weights are in the dtype of the precision, as they were multiplied in training.

    Raises: WrongResult if the folder cannot be read, or the adapters do not fit.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    below = make_base(base, device, precision=precision, seed=seed)
    try:
        model = PeftModel.from_pretrained(below, str(final))
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise WrongResult(
            f"{final}: the adapters that were saved cannot be read again: {first_line(error)}. Look at the file "
            "system, and at the version of peft"
        ) from error
    for weight in model.parameters():
        weight.data = weight.data.to(device, DTYPES[precision])
    return model.eval()


def reloaded_loss(model: Any, packed: Packed, ranks: Ranks, rank: int, device: torch.device) -> float:
    """Return the mean loss of the judged targets, each rank with its part of the blocks.

    Collective: every rank of the group must call this.
    """
    whole = JudgedLoss(model)
    summed = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():
        for block in range(rank, len(packed), ranks.count):
            one = slice(block, block + 1)
            summed += whole(packed.tokens[one].to(device), packed.judged[one].to(device))[0].double()
    return sum(told for [told] in ranks.gather([float(summed)])) / int(packed.judged.sum())
