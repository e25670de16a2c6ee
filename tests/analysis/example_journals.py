"""Journals with collectives, for tests: 8 ranks on gpu-a, or 16 on gpu-a and gpu-b."""

from written_runs import case, measured, place

GB = 1_000_000_000


def collective(busbw, *, name="all_reduce", dtype="bf16", hosts=1, per_node=8, slowest=None, **more):
    """Return a test's line: size -> average busbw in GB/s; the slowest rank's is 2 % less, or as given."""
    ranks, measurements = hosts * per_node, []
    for size, value in busbw.items():
        labels = {"size": size, "dtype": dtype, "world_size": str(ranks), "nnodes": str(hosts), "transport": "P2P"}
        worst = (slowest or {}).get(size, value if isinstance(value, str) else 0.98 * value)
        by_rank = {rank: worst if rank == 0 or isinstance(value, str) else value for rank in range(ranks)}
        measurements += [
            measured(by_rank, f"nccl.{name}.busbw", unit="GB/s", **labels) | more,
            measured([value] * ranks, f"nccl.{name}.average_busbw", unit="GB/s", status="recorded", **labels),
            measured([1.0] * ranks, f"nccl.{name}.algbw", unit="GB/s", status="recorded", **labels),
        ]
    return case(f"acceptance/test_nccl.py::test_{name}[{hosts}-{dtype}]", "passed", *measurements)


def places(hosts=1, per_node=8):
    """Return where the ranks are; torch has NCCL 2.27.3."""
    return [
        place(rank, host=f"gpu-{'abcdef'[rank // per_node]}.example", local_rank=rank % per_node)
        | {"versions": {"nccl": "2.27.3"}}
        for rank in range(hosts * per_node)
    ]
