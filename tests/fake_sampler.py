"""The node's sampler with GPUs that are not there. A test puts :func:`command` in the place of the real one.

    monkeypatch.setattr(node_sampler, "COMMAND", fake_sampler.command(tmp_path, {GPU: {"clock.sm": 1755}}))

The process reads the planted values from a file. A value is what NVML would say; ``{"turns": [1, 2, 3]}`` gives each
once and then always the last; ``{"not available": [reason, kind]}`` raises; ``{"hang": SECONDS}`` does not answer for
so long; ``{"spend": SECONDS, "value": 5}`` burns processor time before it answers; ``{"plain": {...}}`` is an object.
"""

import json
import sys
import time
from pathlib import Path

NO_NVML = "no driver library"


def command(folder, gpus):
    """Write down the GPUs (none: NVML cannot be opened), and return what is to be started."""
    path = folder / "planted-gpus.json"
    path.write_text(json.dumps(gpus))
    return (sys.executable, __file__, str(path))


def _answer(planted):
    if not isinstance(planted, dict):
        return tuple(planted) if isinstance(planted, list) else planted
    if "plain" in planted:
        return planted["plain"]
    if "turns" in planted:
        return _turns([_answer(value) for value in planted["turns"]])
    if "not available" in planted:
        from pytest_gpucluster.node.nvml import NotAvailable

        return NotAvailable(*planted["not available"])
    if "hang" in planted:
        return lambda: time.sleep(planted["hang"]) or 0
    return lambda: _spend(planted["spend"]) or _answer(planted["value"])


def _turns(values):
    left = iter(values)

    def turn():
        value = next(left, values[-1])
        return value() if callable(value) else value

    return turn


def _spend(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        continue


def _open_nvml(gpus):
    from fake_nvml import FakeNvml

    from pytest_gpucluster.errors import EnvironmentBroken

    if gpus is None:
        raise EnvironmentBroken(f"NVML is not available: {NO_NVML}")
    return FakeNvml({uuid: {query: _answer(value) for query, value in of.items()} for uuid, of in gpus.items()})


if __name__ == "__main__":
    from pytest_gpucluster.node.health import gpu_sampler
    from pytest_gpucluster.node.health.sampler_process import main

    sys.path.insert(0, str(Path(__file__).parent))
    text = Path(sys.argv.pop(1)).read_text()
    planted_gpus = json.loads(text)
    # A busy machine is no NVML that hangs.
    gpu_sampler.CLOSE_SECONDS = 1.0 if '"hang"' in text else 30.0
    main(lambda: _open_nvml(planted_gpus))
