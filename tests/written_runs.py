"""Small journals for tests: what is not said is that of two good runs on the same node of H100s."""

from collections.abc import Mapping

from journal_lines import journal_of

from pytest_gpucluster.journal import journal

SUITE = "acceptance/test_it.py"
MATMUL, HBM = f"{SUITE}::test_matmul", f"{SUITE}::test_hbm"
BF16 = "matmul.bf16.tflops"


def place(rank, *, host="gpu-a", local_rank=None, uuid=None):
    """Return where a rank is; ``uuid`` "" is a rank on cpu."""
    uuid = f"GPU-{host}-{rank}" if uuid is None else uuid
    return {
        "rank": rank,
        "host": host,
        "local_rank": rank if local_rank is None else local_rank,
        "gpu": {"uuid": uuid, "index": rank, "name": "NVIDIA H100 80GB HBM3"} if uuid else None,
    }


def measured(values, metric=BF16, *, unit="TFLOPS", width=0.005, status="passed", limit=None, **labels):
    """Return a judged metric; ``width`` is that of each interval, as a share of its value; None: without."""
    by_rank = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
    line = {
        "metric": metric,
        "unit": unit,
        "labels": labels,
        "status": status,
        "value": min(by_rank.values(), key=float),
        "worst_rank": min(by_rank, key=lambda rank: float(by_rank[rank])),
        "values": {str(rank): value for rank, value in by_rank.items()},
        "limit": None if status == "recorded" else {"min": 1.0} if limit is None else dict(limit),
    }
    if width is not None:
        line["intervals"] = {
            str(rank): [value * (1 - width / 2), value * (1 + width / 2)]
            for rank, value in by_rank.items()
            if isinstance(value, (int, float))
        }
    return line


def case(nodeid=MATMUL, outcome="passed", *measurements, **more):
    """Return a test's line."""
    return {
        "type": "test",
        "nodeid": nodeid,
        "name": nodeid.partition("::")[2],
        "criterion": nodeid.partition("test_")[2].partition("::test_")[2],
        "outcome": outcome,
        "measurements": list(measurements),
        **more,
    }


TWO = (place(0), place(1))


def lines(
    *tests,
    run_id="r1",
    started_at="2026-01-02T03:04:05+00:00",
    ranks=TWO,
    sku="H100 SXM",
    digest="d" * 64,
    workload=None,
    collected=None,
    end=None,
    closed=True,
    then=(),
    **run,
):
    """Return a journal's lines: ``then`` follows the tests; without ``closed`` the run was killed there."""
    hosts = dict.fromkeys(rank["host"] for rank in ranks)
    ids = [each["nodeid"] for each in tests] if collected is None else collected
    failed = any(each["outcome"] == "failed" for each in tests)
    word, code = ("REJECTED", 1) if failed else ("ACCEPTED", 0)
    found = [
        {
            "type": "run",
            "schema_version": 1,
            "run_id": run_id,
            "started_at": started_at,
            "hostname": next(iter(hosts), ""),
            "device": "cuda",
            "world_size": len(ranks),
            "nnodes": len(hosts),
            **run,
        },
        {"type": "cluster", "ranks": [dict(rank) for rank in ranks]},
        {"type": "limits", "sku": sku, "gpu_name": None, "files": [{"path": "thresholds.yaml", "sha256": digest}]},
        {
            "type": "workload",
            "profile": "full",
            "file": "w.yaml",
            "values": {"matmul.sizes": "16384", "training.batch": "8"} if workload is None else dict(workload),
            "origins": {"matmul.sizes": "w.yaml:1:1", "training.batch": "w.yaml:2:1"},
        },
        {
            "type": "collected",
            "tests": [{"nodeid": nodeid, "name": nodeid.partition("::")[2]} for nodeid in ids],
            "manifest": True,
        },
    ]
    for each in tests:
        found += [{"type": "start", "nodeid": each["nodeid"]}, dict(each)]
    found += [dict(line) for line in then]
    if closed:
        found.append({"type": "end", "verdict": word, "exit": code, "at": started_at, "reason": "so", **(end or {})})
    return found


def write(folder, *tests, **more):
    """Write a journal into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / journal.JOURNAL_FILE
    path.write_bytes(b"".join(journal.encode(line) for line in lines(*tests, **more)))
    return path


def read(*tests, **more):
    """Return a journal without a file."""
    return journal_of(lines(*tests, **more))
