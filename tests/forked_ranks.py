"""Ranks of a gloo group without torchrun, for code that is collective: forks of a server that has torch loaded.

They are no forks of the test's own process: that may have had groups of its own, and a fork has none of their threads.
"""

import faulthandler
import gc
import json
import multiprocessing
import tempfile
import textwrap
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from pytest_gpucluster.errors import GpuClusterError

DEADLINE_SECONDS = 100
CPU = torch.device("cpu")
_CONTEXT = multiprocessing.get_context("forkserver")
_LOADED = ["pytest_gpucluster.benchmarks.training.data", "pytest_gpucluster.benchmarks.collectives", "peft"]
_LOADED += ["pytest", "transformers.models.qwen2.modeling_qwen2", "pytest_gpucluster.benchmarks.lora.trainer"]
_CONTEXT.set_forkserver_preload(_LOADED)


def on_ranks(count, do, *given):
    """Call ``do(rank, *given)`` on each rank of a new group, ``dist.group.WORLD`` there; return what each has returned.

    Past the deadline all are killed.

    Args:
        do: a function of a module; it may be that of the test.

    Raises:
        AssertionError: a rank has raised, with its traceback, or it has not come back.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(rank, count, Path(folder) / "store", do, given) for rank in range(count)]
        try:
            until = time.monotonic() + DEADLINE_SECONDS
            answers = [_read(answer, until) for _, answer in started]
        finally:
            for process, answer in started:
                answer.close()
                process.kill()
                process.join()
                process.close()
        stacks = [path.read_text() for path in sorted(Path(folder).glob("rank-*"))]
    failed = [f"rank {rank}: {told}" for rank, (well, told) in enumerate(answers) if not well]
    assert not failed, "\n".join([*failed, *stacks])
    return [told for _, told in answers]


def run_script(body, *, ranks):
    """Run the same text on each rank; return what each one has said.

    The text has rank, world_size, group, device, outcome, torch, dist and ``say(value)``: a value of JSON.
    """
    return on_ranks(ranks, _say, textwrap.dedent(body))


def outcome(function):
    """Return what a function returns, or which error it has raised, as text."""
    try:
        return function()
    except (GpuClusterError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _say(rank, body):
    said = []
    given = {"rank": rank, "world_size": dist.get_world_size(), "group": dist.group.WORLD, "device": CPU}
    given |= {
        "outcome": outcome,
        "torch": torch,
        "dist": dist,
        "say": lambda value: said.append(json.loads(json.dumps(value))),
    }
    exec(compile(body, "text of the ranks", "exec"), given)
    return said


def _start(rank, count, store, do, given):
    answer, ours = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_be_rank, args=(rank, count, store, do, given, ours), daemon=True)
    process.start()
    ours.close()
    return process, answer


def _be_rank(rank, count, store, do, given, ours):
    faulthandler.dump_traceback_later(0.8 * DEADLINE_SECONDS, file=store.with_name(f"rank-{rank}").open("w"))
    torch.set_num_threads(1)
    gc.freeze()  # what the server has loaded: to look through it takes 0.3 s, and copies its pages
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), count), rank=rank, world_size=count)
        told = True, do(rank, *given)
        dist.barrier()  # else a rank that is done leaves the others without their peer
    except Exception:
        told = False, traceback.format_exc()
    ours.send(told)
    ours.close()
    time.sleep(DEADLINE_SECONDS)  # to be killed: an interpreter that ends may be aborted by gloo


def _read(answer, until):
    if not answer.poll(max(0.0, until - time.monotonic())):
        return False, "has not come back"
    try:
        told = answer.recv()
    except EOFError:
        return False, "has ended without an answer"
    return told
