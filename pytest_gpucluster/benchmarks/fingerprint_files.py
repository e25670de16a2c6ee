"""Fingerprints of a node's GPUs whose processes cannot talk to each other: each leaves its own in a folder, as a file.

For local workers, which know of each other by number only. Each waits for all the others, so that all compare the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from pytest_gpucluster.benchmarks.gpu_fingerprint import Fingerprint
from pytest_gpucluster.errors import EnvironmentBroken

_POLL_SECONDS = 0.1


def exchange(
    folder: Path,
    own: Fingerprint,
    *,
    index: int,
    count: int,
    name: str,
    wait_seconds: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Fingerprint], dict[int, str]]:
    """Leave this process's fingerprint, and return those of all and how each is called, by number.

    All ``count`` processes must call this, with the same folder, of this run alone.

    Args:
        folder: is made, if it is not there.
        own: what this process's device has computed.
        index: the number of this process, from 0 on.
        count: how many there are.
        name: how this process is called in messages.
        wait_seconds: the others may come so much later.
        now: seconds that only grow.
        sleep: waits for so many seconds.

    Raises: EnvironmentBroken if one of the others does not come: nobody can say then that all agree.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f".{index}"
    mine.write_text(json.dumps({"name": name, "fingerprint": own.to_json()}), encoding="utf-8")
    paths = [folder / f"fingerprint-{number}.json" for number in range(count)]
    os.replace(mine, paths[index])  # whole or not at all
    until = now() + wait_seconds
    while missing := [number for number, path in enumerate(paths) if not path.exists()]:
        if now() >= until:
            raise EnvironmentBroken(
                f"{name}: no fingerprint to compare with came from worker {', '.join(map(str, missing))} within"
                f" {wait_seconds:g} s: see what became of it; without it nobody can say that all GPUs agree"
            )
        sleep(_POLL_SECONDS)
    told = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    prints = [Fingerprint.from_json(one["fingerprint"]) for one in told]
    return prints, {number: str(one["name"]) for number, one in enumerate(told)}
