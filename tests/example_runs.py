"""Runs that are always the same, for golden files and for all that is made from a journal.

- ``cluster``: 2 nodes x 8 H100 on which much is wrong: REJECTED, and a rank is lost at the end
- ``accepted``: the same cluster, and all is well
- ``rehearsal``: 2 ranks on cpu
- ``broken``: ended without a word while a test ran, with a line that is cut off
- ``hostile``: names and messages that must never be taken for markup, commands or control sequences
"""

import functools
import json
import math
from dataclasses import replace

from example_cluster import ExampleRun, searched
from example_files import links_within_nodes, loss_curve, write_courses, write_curve, write_links

from pytest_gpucluster.agreement.exchange import RankOutcome
from pytest_gpucluster.isolation.finding import exclude_text
from pytest_gpucluster.isolation.link_survey import compact, culprit_lines
from pytest_gpucluster.journal.journal import JOURNAL_FILE, JournalBuilder, encode
from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name

HOSTS = ("gpu-01", "gpu-02")
SIZES = ("1 MB", "16 MB", "256 MB", "1 GB", "8 GB")
SQUARES = "4096, 8192, 16384"
"""The sizes of the products, of which the best is judged."""

HEALTH = "acceptance/test_health.py::test_gpu_health"
MATMUL = "acceptance/test_matmul.py::test_matmul[bf16]"
MATMUL_FP8 = "acceptance/test_matmul.py::test_matmul[fp8]"
HBM = "acceptance/test_hbm.py::test_hbm[copy]"
HOST_LINK = "acceptance/test_host_link.py::test_host_link[both]"
NODE_ALL_REDUCE = "acceptance/test_nccl.py::test_all_reduce[node-bf16]"
WORLD_ALL_REDUCE = "acceptance/test_nccl.py::test_all_reduce[world-bf16]"
LINKS = "acceptance/test_links.py::test_links_within_node"
BURN_IN = "acceptance/test_burn_in.py::test_burn_in"
DDP = "acceptance/test_ddp.py::test_ddp"
LORA = "acceptance/test_qwen2_lora.py::test_lora_tiny"
QWEN2 = "acceptance/test_qwen2_lora.py::test_qwen2_lora"
THROUGHPUT = "acceptance/test_training.py::test_throughput[fsdp-large]"
KUBERNETES = "acceptance/test_scheduler.py::test_kubernetes"
CHECKPOINT = "acceptance/test_checkpoint.py::test_checkpoint_bandwidth"

CRITERIA = {
    HEALTH: "gpu.health",
    MATMUL: "matmul",
    MATMUL_FP8: "matmul",
    HBM: "hbm",
    HOST_LINK: "host_link",
    NODE_ALL_REDUCE: "nccl.all_reduce",
    WORLD_ALL_REDUCE: "nccl.all_reduce",
    LINKS: "links",
    BURN_IN: "burn_in",
    DDP: "ddp",
    LORA: "lora_tiny",
    QWEN2: "qwen2_lora",
    KUBERNETES: "kubernetes",
    THROUGHPUT: "training.throughput",
    CHECKPOINT: "checkpoint.bandwidth",
}

HOT_RANK = 11
"""Of ``cluster``: its GPU is slowed down by heat."""
SLOW_LINK_RANK = 13
"""Of ``cluster``: half of its GPU's NVLinks are down, so its node is slow in collectives, too."""
LOST_RANK = 5
"""Of ``cluster``: it is killed in the last test that began."""

HOSTILE_HOST = "<script>alert(1)</script>\x1b[31m\u202egpu\x00"
HOSTILE_TEXT = (
    "a\x1b]0;title\x07 <img src=x onerror=alert(2)> | `rm -rf` @everyone ]]> \u202e {{ 7*7 }} \ud800 \x85\nE  b"
)


def lines(name):
    """Return the lines of an example run.

    Raises: KeyError if there is no such run.
    """
    return _RUNS[name]()[0]


def read(*told):
    """Return a journal of these lines as reports read it, without samples."""
    builder = JournalBuilder(keep_samples=False)
    for line in told:
        builder.add(json.loads(encode(line)))
    return builder.journal()


@functools.cache
def journal_of(name):
    """Return an example run as reports read it. It is read once."""
    return read(*lines(name))


def write(folder, name):
    """Write an example run into a folder as a run's own: ``journal.jsonl``, artifacts, exclude.txt. Return the folder.

    Raises: KeyError if there is no such run.
    """
    told, leave = _RUNS[name]()
    folder.mkdir(parents=True, exist_ok=True)
    content = b"".join(encode(line) for line in told)
    if name == "broken":
        content += encode({"type": "problem", "name": "cut"})[:17]  # the process was killed while it wrote
    (folder / JOURNAL_FILE).write_bytes(content)
    leave(folder)
    return folder


def _cluster(is_well):
    run = ExampleRun(hosts=HOSTS, per_node=8, seed=1)
    run.begin()
    run.collect(CRITERIA)
    hot = {} if is_well else {HOT_RANK: 2.4}
    run.test(HEALTH, run.values("gpu.findings", 0, unit="findings", exact=True), seconds=6.1)
    _matmul(run, hot)
    run.test(
        MATMUL_FP8,
        run.values("matmul.fp8.tflops", 1391, unit="TFLOPS", best_of=SQUARES, telemetry=run.watched()),
        seconds=14.2,
    )
    run.test(
        HBM,
        run.values("hbm.copy.bandwidth", 2.94, unit="TB/s", size="8 GB", record_only=True),
        run.values("hbm.copy.bandwidth", 3.02, unit="TB/s", size="32 GB", telemetry=run.watched(watts=410)),
    )
    run.test(
        HOST_LINK,
        *(
            run.values(f"host_link.{way}.bandwidth", rate, unit="GB/s", mode="both", size="4 GB")
            for way, rate in (("h2d", 41.8), ("d2h", 43.1))
        ),
    )
    _all_reduce(run, is_well)
    survey = links_within_nodes(run, slow=() if is_well else (SLOW_LINK_RANK,))
    rates = {rank: survey.of_rank(rank).bytes_per_second / 1e9 for rank in run.ranks}
    beside = {rank: survey.matrix.ratio(survey.of_rank(rank)) or math.nan for rank in run.ranks}
    labels = {"scope": "node", "size": "256 MB", "world_size": 8, "nnodes": 1, "transport": "P2P"}
    run.test(
        LINKS,
        run.values("link.bandwidth", 0, unit="GB/s", others=rates, exact=True, **labels),
        run.values("link.ratio_to_median", 0, unit="ratio", others=beside, exact=True, **labels),
        bad={}
        if is_well
        else {
            SLOW_LINK_RANK: RankOutcome(
                rank=SLOW_LINK_RANK,
                outcome="failed",
                message=culprit_lines(survey, "slow")[0],
                text="\n".join(culprit_lines(survey, "slow")),
            )
        },
        properties=[("nccl.transport", "P2P"), ("links.matrix", compact(survey))],
        seconds=9.9,
    )
    _burn_in(run, hot)
    run.test(DDP, run.values("ddp.loss_error", 2.1e-7, unit="ratio", exact=True, steps=4), seconds=3.4)
    curve = loss_curve()
    _lora(run, curve)
    if is_well:
        _lora(run, curve, nodeid=QWEN2)
    else:
        run.skip(QWEN2, _NO_WEIGHTS, applies=True)
    run.skip(KUBERNETES, "this run was not started by Kubernetes")
    if is_well:
        _throughput(run)
        run.test(CHECKPOINT, run.values("checkpoint.verified", 1, unit="ratio", exact=True, file_system="lustre"))
    else:
        pid = run.who[LOST_RANK]["pid"]
        run.lose(
            THROUGHPUT, LOST_RANK, f"process {pid} has exited without a message (the last it did: call of {THROUGHPUT})"
        )
    run.end(properties=[("site", "hall 3"), ("ticket", "OPS-1234")])

    def leave(folder):
        artifacts = folder / ARTIFACTS
        write_links(artifacts / artifacts_name(LINKS), survey)
        write_curve(artifacts / artifacts_name(LORA), curve)
        write_courses(artifacts / artifacts_name(BURN_IN), run.ranks, slow=tuple(hot))
        if not is_well:
            found = _search()
            text = exclude_text(found, host=HOSTS.__getitem__, name=HOSTS.__getitem__)
            (folder / "exclude.txt").write_text(text, encoding="utf-8")

    return run.lines, leave


_NO_WEIGHTS = (
    "give the weights and the data: --gpucluster-model FOLDER or Qwen/Qwen2-7B@COMMIT, and --gpucluster-data "
    "function_calls=FILE or glaiveai/glaive-function-calling-v2"
)


def _matmul(run, hot):
    slow = dict.fromkeys(hot, 588.0)
    seen = run.watched(hot=hot)
    largest = run.values("matmul.bf16.tflops", 672, unit="TFLOPS", others=slow, n=16384, record_only=True)
    best = run.values("matmul.bf16.tflops", 731, unit="TFLOPS", others=slow, best_of=SQUARES, telemetry=seen)
    run.test(
        MATMUL,
        run.values("matmul.bf16.tflops", 702, unit="TFLOPS", others=slow, exact=True, n=4096, record_only=True),
        {rank: [replace(one, labels={"n": "8192"}, record_only=True) for one in ones] for rank, ones in best.items()},
        largest,
        best,
        telemetry={rank: {**one, "counters": {"energy_joules": 9400}} for rank, one in seen.items()},
        seconds=21.3,
        printed="warming up for 2 s\n",
    )


def _all_reduce(run, is_well):
    inside = {rank: 442.0 if is_well or rank < run.per_node else 212.0 for rank in run.ranks}
    labels = {"dtype": "bf16", "world_size": 8, "nnodes": 1, "transport": "P2P"}
    run.test(
        NODE_ALL_REDUCE,
        *_sweep(run, inside, labels),
        properties=[("nccl.transport", "P2P"), ("nccl.algorithms", "8000000000 B: NVLS Simple")],
        isolated=None if is_well else (_search(), HOSTS.__getitem__),
        seconds=44.0,
    )
    transport = "NET/IB" if is_well else "NET/Socket"
    across = dict.fromkeys(run.ranks, 435.0 if is_well else 9.2)
    labels = {"dtype": "bf16", "world_size": 16, "nnodes": 2, "transport": transport}
    why = {} if is_well else {"transport": "rank 8: NET/IB : No device found."}
    run.test(
        WORLD_ALL_REDUCE,
        *_sweep(run, across, labels, why),
        properties=[("nccl.transport", transport), *((f"nccl.{name}", text) for name, text in why.items())],
        seconds=61.0,
    )


def _sweep(run, top, labels, why=None):
    """Yield busbw and algbw of each size as the all-reduce criterion records them: small messages are all latency."""
    ranks = labels["world_size"]
    for size, payload_bytes in zip(SIZES, (1e6, 16e6, 256e6, 1e9, 8e9), strict=True):
        share = payload_bytes / (payload_bytes + 40e6)
        seen = {rank: {**one, **(why or {})} for rank, one in run.watched(watts=380).items()}
        for metric, factor in (("algbw", ranks / (2 * (ranks - 1))), ("busbw", 1.0)):
            rates = {rank: rate * share * factor for rank, rate in top.items()}
            yield run.values(
                f"nccl.all_reduce.{metric}",
                0,
                unit="GB/s",
                others=rates,
                telemetry=seen,
                record_only=metric == "algbw",
                size=size,
                **labels,
            )


def _search():
    return searched(len(HOSTS), lambda members: 212.0 if 1 in members else 441.0)


def _burn_in(run, hot):
    seen = run.watched(seconds=600.0, hot=dict.fromkeys(hot, 400.0))
    labels = {"n": 16384, "load": "burn-in", "telemetry": seen}
    slow = dict.fromkeys(hot, 611.0)
    run.test(
        BURN_IN,
        run.values("burn_in.completed", 1, unit="ratio", exact=True, record_only=True, **labels),
        run.values("matmul.bf16.tflops", 730, unit="TFLOPS", others=slow, exact=True, **labels),
        run.values("burn_in.retention", 0.98, unit="ratio", others=dict.fromkeys(hot, 0.83), exact=True, **labels),
        run.values("burn_in.slowed", 0, unit="ratio", others=dict.fromkeys(hot, 0.667), exact=True, **labels),
        run.values("burn_in.temperature", 65, unit="degC", others=dict.fromkeys(hot, 92), exact=True, **labels),
        properties=[("burn_in", "after 600 s of 600 s, and 40800 products, 730 TFLOPS")],
        seconds=612.0,
    )


def _lora(run, curve, *, nodeid=LORA):
    final = sum(point.loss for point in curve.points[-10:]) / 10
    labels = {"model": "lora_tiny", "precision": "bf16", "groups": 1, "group_ranks": len(run.ranks)}
    run.test(
        nodeid,
        run.values("lora.finite_steps", 1, unit="ratio", exact=True, **labels),
        run.values("lora.final_loss", final, unit="nats", exact=True, **labels),
        run.values("lora.held_out_ratio", 0.16, unit="ratio", exact=True, **labels),
        run.values("lora.unchanged_base", 1, unit="ratio", exact=True, **labels),
        properties=[("lora.base", "random weights, seed 1"), ("lora.data", "synthetic"), ("lora.notes", "none")],
        seconds=38.0,
    )


def _throughput(run):
    labels = {"strategy": "fsdp", "model": "large", "compiled": "on"}
    run.test(
        THROUGHPUT,
        run.values("training.tokens_per_second", 6630, unit="tokens/s", telemetry=run.watched(watts=640), **labels),
        run.values("training.mfu", 0.345, unit="ratio", **labels),
        run.values("training.step_time", 1.23, unit="s", **labels),
        seconds=52.0,
    )


_REHEARSED = {MATMUL: "matmul", HBM: "hbm", NODE_ALL_REDUCE: "nccl.all_reduce", HEALTH: "gpu.health", LORA: "lora_tiny"}
_SMALL = {"matmul.sizes": "128, 256", "matmul.window": "0.3 s", "hbm.sizes": "8 MiB, 32 MiB"}


def _rehearsal():
    run = ExampleRun(hosts=("laptop",), per_node=2, device="cpu", seed=2)
    run.begin(workload=_SMALL)
    run.collect(_REHEARSED)
    _rehearse(run)
    run.skip(HEALTH, "needs a GPU, and this is a rehearsal on cpu")
    curve = loss_curve(seed=8)
    _lora(run, curve)
    run.end()
    return run.lines, lambda folder: write_curve(folder / ARTIFACTS / artifacts_name(LORA), curve)


def _rehearse(run):
    run.test(MATMUL, run.values("matmul.bf16.tflops", 12.5, unit="GFLOPS", n=256), seconds=1.1)
    run.test(HBM, run.values("hbm.copy.bandwidth", 7.4, unit="GB/s", size="32 MiB"), seconds=0.9)
    labels = {"dtype": "bf16", "world_size": 2, "nnodes": 1, "transport": "gloo"}
    run.test(
        NODE_ALL_REDUCE,
        *(
            run.values("nccl.all_reduce.busbw", rate, unit="MB/s", size=size, **labels)
            for size, rate in (("64 kB", 90), ("256 kB", 210), ("1 MB", 380))
        ),
        seconds=2.2,
    )


def _broken():
    run = ExampleRun(hosts=("laptop",), per_node=2, device="cpu", seed=3)
    run.begin(workload=_SMALL)
    run.collect(_REHEARSED)
    _rehearse(run)
    run.start(LORA)
    return run.lines, lambda _: None


def _hostile():
    run = ExampleRun(hosts=(HOSTILE_HOST, "n" * 10_000), per_node=2, seed=4)
    hostile = f"acceptance/test_x.py::test_<b>bold</b>[{HOSTILE_TEXT}]"
    run.begin()
    run.collect({hostile: "</td><script>", MATMUL: "matmul", HBM: "hbm", DDP: "ddp"})
    labels = {"size": HOSTILE_TEXT, "javascript:alert(3)": "\u202e\x00\x1b[2J"}
    run.test(
        hostile,
        run.values("matmul.bf16.tflops", 731, unit="TFLOPS", **labels),
        bad={1: RankOutcome(rank=1, outcome="failed", message=HOSTILE_TEXT, text=f"{HOSTILE_TEXT}\n" + "x" * 20_000)},
        properties=[("<script>", HOSTILE_TEXT), (HOSTILE_TEXT, "javascript:alert(4)")],
        printed=HOSTILE_TEXT,
    )
    run.test(MATMUL, run.values("matmul.bf16.tflops", 731, unit="TFLOPS", others={2: math.nan, 3: math.inf}))
    run.test(HBM)  # a criterion that has measured nothing
    run.lines.append(
        {"type": "problem", "name": HOSTILE_TEXT, "outcome": "error", "message": HOSTILE_TEXT, "text": HOSTILE_TEXT}
    )
    run.lines.append({"type": "a later version's", "value": HOSTILE_TEXT})
    run.end(properties=[(HOSTILE_TEXT, HOSTILE_TEXT)])
    return run.lines, lambda _: None


_RUNS = {
    "cluster": lambda: _cluster(is_well=False),
    "accepted": lambda: _cluster(is_well=True),
    "rehearsal": _rehearsal,
    "broken": _broken,
    "hostile": _hostile,
}
NAMES = tuple(_RUNS)


def large(ranks=1024, criteria=40):
    """Yield the lines of a large run one by one: all of them at once would fill the memory.

    Every fourth criterion is a sweep of an all-reduce over ``SIZES``, the others are products and copies; one GPU in
    a hundred is slow, and every tenth criterion fails for it.
    """
    run = _large_run(ranks)
    run.begin()
    tests = {
        f"acceptance/test_large.py::test_criterion[{number:02}]": f"criterion.{number:02}" for number in range(criteria)
    }
    run.collect(tests)
    labels = {"dtype": "bf16", "world_size": len(run.ranks), "nnodes": len(run.hosts), "transport": "NET/IB"}
    for number, nodeid in enumerate(tests):
        yield from _taken(run)
        hot = {rank: 1.5 for rank in run.ranks if rank % 100 == 57 and number % 10 == 3}
        seen = run.watched(hot=hot)
        if number % 4 == 0:
            run.test(nodeid, *_sweep(run, dict.fromkeys(run.ranks, 431.0), labels), telemetry=seen)
        elif number % 4 == 1:
            run.test(nodeid, run.values("hbm.copy.bandwidth", 3.02, unit="TB/s", size="32 GB", telemetry=seen))
        else:
            slow = dict.fromkeys(hot, 588.0)
            run.test(
                nodeid,
                run.values("matmul.bf16.tflops", 731, unit="TFLOPS", others=slow, best_of=SQUARES, telemetry=seen),
                telemetry=seen,
            )
    run.end()
    yield from _taken(run)


def _taken(run):
    taken, run.lines = run.lines, []
    return taken


def write_large(folder, *, ranks=1024, criteria=40):
    """Write the large run into a folder, which is returned: some 0.1 GB, which take some 15 s.

    Its first test has left a matrix of links, its second the course of a burn-in on each rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    nodeids = []
    with (folder / JOURNAL_FILE).open("wb") as file:
        for line in large(ranks, criteria):
            nodeids += [line["nodeid"]] if line["type"] == "start" else []
            file.write(encode(line))
    run = _large_run(ranks)
    places = [folder / ARTIFACTS / artifacts_name(nodeid) for nodeid in nodeids[:2]]
    if run.per_node > 1:
        write_links(places[0], links_within_nodes(run, slow=(run.ranks[-1],)))
    write_courses(places[-1], run.ranks, slow=(run.ranks[-1],))
    return folder


def _large_run(ranks):
    return ExampleRun(hosts=[f"gpu-{node:03}" for node in range(max(1, ranks // 8))], per_node=min(8, ranks), seed=9)
