"""Does every GPU keep its rate and compute correctly for hours, is its memory sound, and do all give the same bits?"""

import os

import pytest

from pytest_gpucluster.benchmarks.burn_in import TimeSeries, burn_in
from pytest_gpucluster.benchmarks.fingerprint import Fingerprint, FingerprintAgreement, exchange, take_fingerprint
from pytest_gpucluster.benchmarks.memory_patterns import PATTERNS, Survey, run_pattern
from pytest_gpucluster.judge.misses import SLOWDOWNS
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.metrics.finding import identity
from pytest_gpucluster.node.host import WORKERS

SETUP_SECONDS = 120.0  # making the operands and the reference, or the buffers
ROUND_SECONDS = 120.0  # of one pattern over all memory: some 20 s are expected on the largest and on the slowest GPU
WORKER_SKEW_SECONDS = 600.0  # by which one local worker may reach a test later than another

LOCAL_WORKERS = int(os.environ.get(WORKERS, "1"))


@pytest.fixture(autouse=True)
def deadline(request, workload):
    """Give each test the time that its workload may take."""
    seconds = {
        "test_burn_in": 1.2 * workload.burn_in.duration_seconds,
        "test_memory_patterns": ROUND_SECONDS * workload.memory_patterns.rounds,
        "test_gpu_repeats_its_bits": 10.0 * workload.determinism.repeats + WORKER_SKEW_SECONDS * (LOCAL_WORKERS > 1),
    }
    request.node.add_marker(pytest.mark.deadline(SETUP_SECONDS + seconds.get(request.node.originalname, 0.0)))


@pytest.fixture
def names(inventory):
    """Rank to the name of its GPU."""
    return {who["rank"]: f"rank {who['rank']}, {identity(who)}" for who in inventory}


@pytest.fixture
def local_worker(request, artifacts, inventory):
    """Without a launcher: the number of this worker, its name, and a folder that all workers share."""
    if LOCAL_WORKERS < 2:
        return None
    index = int(request.config.workerinput["workerid"].removeprefix("gw"))
    # Each worker's artifacts are in a folder of its own, side by side.
    return index, f"rank {index}, {identity(inventory[0])}", artifacts.parent.parent / "fingerprints"


@pytest.mark.soak
@pytest.mark.single_gpu
@pytest.mark.criterion("burn_in")
def test_burn_in(cluster, names, workload, telemetry, artifacts, progress, measure, record_property):
    """Accepted: every GPU multiplies without a pause for the duration of the workload, every product is correct, the
    rate reaches matmul's limit and is the same in the last minute as in the first, and neither heat nor the power
    supply has slowed the GPU down.

    Why: heat builds up slowly, and some faults show only then: a fan, a cold plate, a power supply, a unit that is
    wrong once in a million products. All GPUs of a node draw full power at once, as in training. Duration:
    ``burn_in.duration`` of the profile. Below ten minutes the first and the last tenth are
    compared.

    When it fails: the rate fell: look at the recorded temperature, power and throttle reasons, at airflow or coolant,
    and at the rate over time, a CSV file for each rank in the test's folder. A wrong product: take this GPU out of
    service and run the vendor's diagnostics (``dcgmi diag -r 3``). Stopped: what was measured until then is recorded,
    and is no pass.

    On cpu this rehearses for a moment.
    """
    config = workload.burn_in
    window = telemetry()
    series = TimeSeries(config.duration_seconds, artifacts / f"burn-in-rank-{cluster.rank}.csv")
    try:
        burn_in(
            cluster.device,
            series,
            n=config.n,
            dtype=config.dtype,
            interval_seconds=config.interval_seconds,
            during=window,
            progress=progress,
        )
    finally:
        record_property("burn_in", series.progress_text)
        summary = window.summary()
        for one in series.metric_values(config.dtype, summary, slowdowns=SLOWDOWNS):
            measure(
                one.metric,
                one.value,
                unit=one.unit,
                telemetry=summary,
                record_only=one.record_only,
                n=config.n,
                load="burn-in",
            )
    series.require_ends()
    series.require_telemetry(summary, names[cluster.rank])


@pytest.mark.single_gpu
@pytest.mark.criterion("gpu.memory_patterns")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_memory_patterns(pattern, cluster, workload, artifacts, progress, measure):
    """Accepted: most of every GPU's memory is read as it was written, bit by bit, with this pattern.

    Why: a bad cell corrupts the one tensor that lies there, hours into a job. Walking bits find cells that stick to a
    value or to a neighbour, moving inversions those that a write to another cell disturbs, random words those that two
    addresses share. ECC corrects single bits, and its counters report those, not these.

    When it fails: the places are listed in the test's folder: buffer, byte offset, expected and found bits. One place
    is a cell, many with the same bit a line. Take this GPU out of service and look at ECC errors and row remaps
    (``nvidia-smi -q -d ECC,ROW_REMAPPER``). Too small a share: another process uses memory (nvidia-smi names it).

    On cpu this rehearses with a few MiB.
    """
    config = workload.memory_patterns
    survey = Survey(pattern=pattern)
    try:
        run_pattern(
            cluster.device,
            survey,
            share=config.share,
            most_bytes=config.most_bytes,
            rounds=config.rounds,
            progress=progress,
        )
    finally:
        labels = {"pattern": pattern}
        if survey.wrong_words:
            path = artifacts / f"memory-{pattern}-rank-{cluster.rank}.txt"
            path.write_text(survey.report(), encoding="utf-8")
        # One wrong word decides at once; that there is none is known only at the end.
        judged = survey.is_complete or survey.wrong_words > 0
        if judged or survey.passes:
            metric = "gpu.memory_patterns.wrong_words"
            measure(metric, survey.wrong_words, unit="words", record_only=not judged, **labels)
        if survey.is_complete:
            measure("gpu.memory_patterns.share", survey.share, unit="ratio", **labels)
    survey.require_right()


@pytest.mark.single_gpu
@pytest.mark.criterion("gpu.determinism")
def test_gpu_repeats_its_bits(cluster, names, workload, local_worker, measure):
    """Accepted: every GPU gives the same bits each time it computes the same: products in each dtype, sums, softmax,
    attention, special functions, integers. Without a launcher the GPUs of the node are compared here too, as
    ``test_gpus_agree`` does with one.

    Why: the software uses the same order of operations each time, so a difference comes from the hardware. A GPU that
    is wrong now and then is the hardest to find later.

    When it fails: repeat it there, take this GPU out of service, and run the vendor's diagnostics
    (``dcgmi diag -r 3``).

    On cpu the CPU computes, without fp8.
    """
    config = workload.determinism
    fingerprint = take_fingerprint(cluster.device, n=config.n, repeats=config.repeats)
    measure("gpu.determinism.repeated", fingerprint.repeatable, unit="ratio", repeats=config.repeats)
    if local_worker is None:
        fingerprint.require_repeatable(names[cluster.rank])
        return
    index, name, folder = local_worker
    fingerprints, names_by_index = exchange(
        folder, fingerprint, index=index, count=LOCAL_WORKERS, name=name, wait_seconds=WORKER_SKEW_SECONDS
    )
    fingerprint.require_repeatable(name)
    agreement = FingerprintAgreement(fingerprints)
    measure("gpu.determinism.agreed", agreement.agreement_ratio(index), unit="ratio")
    agreement.require(index, names_by_index)


@pytest.mark.needs_ranks(2)
@pytest.mark.criterion("gpu.determinism")
def test_gpus_agree(cluster, names, workload, measure):
    """Accepted: all GPUs of a model give the same bits for the same computation.

    Why: equal GPUs with equal software compute equally, to the last bit. One that does not is wrong, though its result
    may look as good as any: it spoils what all others compute with it.

    When it fails: the GPUs in the minority are named, with the computation. Repeat ``test_gpu_computes`` and
    ``test_matmul`` there, and run the vendor's diagnostics (``dcgmi diag -r 3``). With two GPUs it is
    unknown which one is wrong: run it with a third. An error: there is no other GPU to compare with.

    On cpu the ranks' CPUs are compared.
    """
    mine = take_fingerprint(cluster.device, n=workload.determinism.n, repeats=1)
    fingerprints = cluster.all_gather_object(codec.to_json(mine))
    agreement = FingerprintAgreement([codec.read(Fingerprint, one, "ranks") for one in fingerprints])
    measure("gpu.determinism.agreed", agreement.agreement_ratio(cluster.rank), unit="ratio")
    agreement.require(cluster.rank, names)
