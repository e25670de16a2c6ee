"""The fixtures that acceptance tests are written with. None of them communicates in its set-up.

Names that another plugin or a project may have too begin with ``gpucluster_``; ``short_fixtures`` has them without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from pytest_gpucluster.journal.run_directory import artifacts_name
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.session.phases import IN_CALL, MEASUREMENTS

if TYPE_CHECKING:
    from pytest_gpucluster.agreement.store import Board
    from pytest_gpucluster.config.workload import Workload
    from pytest_gpucluster.judge.limits import Thresholds
    from pytest_gpucluster.metrics.datasheets import Peaks
    from pytest_gpucluster.metrics.sampling import Series
    from pytest_gpucluster.node.fabric.ports import FabricSources
    from pytest_gpucluster.node.health.snapshot import Sources
    from pytest_gpucluster.node.health.telemetry import Window
    from pytest_gpucluster.node.nvml import Nvml
    from pytest_gpucluster.session.cluster import Cluster
    from pytest_gpucluster.session.reporting import ReportProgress
    from pytest_gpucluster.session.run import Run
    from pytest_gpucluster.session.selection import TrainingInputs


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The GPU of this rank. In a rehearsal on cpu: name "cpu", sku "cpu-rehearsal", no peaks.

    ``index`` is NVML's, which CUDA_VISIBLE_DEVICES does not change.
    """

    index: int | None
    name: str
    uuid: str | None
    pci_bus_id: str | None
    sku: str | None
    peaks: Peaks | None


class Measure:
    """The type of the ``measure`` fixture."""

    def __init__(self, item: pytest.Item, cluster: Cluster) -> None:
        self._item, self._cluster = item, cluster
        self._recorded: list[measurement.Measurement] = []
        item.stash[MEASUREMENTS] = self._recorded

    def __call__(
        self,
        metric: str,
        value: float | Series,
        *,
        unit: str,
        samples: Sequence[float] = (),
        telemetry: Mapping[str, Any] | None = None,
        record_only: bool = False,
        **labels: object,
    ) -> None:
        """Record a value, as the fixture's description says."""
        if not self._item.stash.get(IN_CALL, False):
            pytest.fail(
                f"{metric} was measured outside the call phase of {self._item.nodeid}, where nothing judges it: call "
                "measure() in the body of the test, not in a fixture and not after a fixture's yield",
                pytrace=False,
            )
        self._recorded.append(
            measurement.measurement(
                metric,
                value,
                unit=unit,
                samples=samples,
                labels={**{key: str(label) for key, label in labels.items()}, **self._cluster.labels},
                telemetry=telemetry,
                record_only=record_only,
            )
        )


Telemetry: TypeAlias = "Callable[[], Window]"
"""The type of the ``telemetry`` fixture."""


def _run(request: pytest.FixtureRequest) -> Run:
    from pytest_gpucluster.session.run import RUN

    run = request.config.stash.get(RUN, None)
    if run is None:
        pytest.fail(
            "pytest-gpucluster is not active here. Turn it on with `gpucluster = true` in the ini file, or with any "
            "--gpucluster-* option",
            pytrace=False,
        )
    return run


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The launched ranks: rank, local_rank, world_size, local_world_size, node_rank, nnodes, hostname, hosts, device,
    backend, group (the process group, made on first use), barrier(), all_gather_object(x), subgroups(size)."""
    return _run(request).cluster


@pytest.fixture(scope="session")
def gpucluster_gpu(request: pytest.FixtureRequest) -> Gpu:
    """The GPU of this rank: index, name, uuid, pci_bus_id, sku, peaks."""
    run = _run(request)
    known = run.roll.who[run.rank].get("gpu")
    sku = run.sku(known["name"] if known else None)
    if not known:
        return Gpu(index=None, name="cpu", uuid=None, pci_bus_id=None, sku=sku, peaks=None)
    from pytest_gpucluster.metrics.datasheets import SKUS

    fields = {key: known[key] for key in ("index", "name", "uuid", "pci_bus_id")}
    peaks = SKUS[sku].peaks if sku is not None and sku in SKUS else None
    return Gpu(sku=sku, peaks=peaks, **fields)


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Measure:
    """Record a value: ``measure("matmul.bf16.tflops", 731.0, unit="TFLOPS", samples=[...], n=16384)``.

    Instead of a number it can be a ``Series``, which brings its samples and how sure its median is: then the worse end
    of its interval must meet the limit.

    All measurements of a test, from all ranks, are judged together at the end of its call phase, against the limits
    for this SKU and topology. A metric without a limit is an error, unless it is declared as recorded or
    ``record_only=True``. Further keywords are labels: they distinguish the values of a sweep and choose among limits.
    """
    return Measure(request.node, _run(request).cluster)


@pytest.fixture(scope="session")
def gpucluster_workload(request: pytest.FixtureRequest) -> Workload:
    """The sizes, shapes and times to measure with: the profile in force of the ``workloads.yaml`` next to the tests,
    with ``--gpucluster-workload`` laid over it. An attribute for each section of the file: matmul, hbm, all_reduce
    (its key is nccl.all_reduce), health."""
    found = _run(request).loaded_workload
    if found is None:
        pytest.fail(
            "this fixture was asked for while the test was already running, when no workload has been read: name "
            "`gpucluster_workload` among the arguments of the test or of its fixtures",
            pytrace=False,
        )
    return found


@pytest.fixture(scope="session")
def gpucluster_telemetry(request: pytest.FixtureRequest) -> Telemetry:
    """Watch the GPU while it is measured: ``window = telemetry()`` is a context manager for the measurement, and
    ``measure(..., telemetry=window.summary())`` records its clocks, power, temperature, utilisation and throttle
    reasons. On cpu a window does nothing and its summary is empty. What NVML does not report never fails a test: the
    summary names it. The whole body of every test is watched in any case."""
    return _run(request).monitor.window


@pytest.fixture(scope="session")
def nvml() -> Nvml:
    """NVML of this node, opened on first use. Where there is none the test is an error: health is then unknown."""
    from pytest_gpucluster.node.nvml import open_nvml

    return open_nvml()


@pytest.fixture(scope="session")
def gpu_sources(nvml: Nvml) -> Sources:
    """Where health criteria ask: NVML, kernel log, PCI bus, process table."""
    from pytest_gpucluster.node.health.snapshot import Sources

    return Sources(nvml=nvml)


@pytest.fixture(scope="session")
def fabric_sources() -> FabricSources:
    """Where the fabric's facts are read: sysfs and /proc for ports and modules, the environment and NCCL's files for
    its settings. A test of your own can replace it."""
    from pytest_gpucluster.node.fabric.ports import FabricSources

    return FabricSources()


@pytest.fixture(scope="session")
def gpucluster_limits(request: pytest.FixtureRequest) -> Thresholds:
    """The limits in force: the shipped thresholds.yaml with --gpucluster-thresholds laid over it."""
    return _run(request).limits


@pytest.fixture(scope="session")
def gpucluster_inventory(request: pytest.FixtureRequest) -> list[Mapping[str, Any]]:
    """What every rank reported of itself before the first test, in the order of ranks: rank, host, node_rank,
    local_rank, pid, gpu (None on cpu), versions."""
    from pytest_gpucluster.agreement.rendezvous import fetch_reports

    run = _run(request)
    who = run.roll.who
    if len(who) < run.facts.world_size:
        who = fetch_reports(run.stores.main, range(run.facts.world_size))
    return [who[rank] for rank in sorted(who)]


@pytest.fixture(scope="session")
def gpucluster_board(request: pytest.FixtureRequest) -> Board:
    """Where ranks leave notices for each other without a process group, over the store through which they have met:
    ``board.gather(name, value, ranks, within_seconds=...)`` returns the notices of these ranks that came in time, and
    each of these ranks must call it. A notice is of plain JSON types, and lasts for one phase of a test."""
    from pytest_gpucluster.agreement.store import Board

    run = _run(request)
    return Board(run.stores.main, run.rank, lambda: run.exchange.number)


@pytest.fixture(scope="session")
def gpucluster_settings(request: pytest.FixtureRequest) -> TrainingInputs:
    """What training takes from outside, as the options say: data ("images", "function_calls" -> name, path, revision,
    sha256), model (name, path, revision), resume, scratch, reference_curve. What was not given is None, data are empty
    then; paths were there, on every rank, before the first test."""
    from pytest_gpucluster.session.selection import TrainingInputs

    return TrainingInputs.of(_run(request).settings)


@pytest.fixture
def artifacts(request: pytest.FixtureRequest) -> Path:
    """A folder for this test's files on this rank's host, inside the report directory of the run."""
    run = _run(request)
    folder = run.artifacts_directory() / artifacts_name(request.node.nodeid)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def gpucluster_progress(request: pytest.FixtureRequest) -> ReportProgress:
    """Show how far a long test is: ``progress(step, of, loss=..., tokens_per_second=...)`` on every rank. Rank 0's
    terminal shows it with the remaining time, every 10 s and at the last step; ``-q`` and local workers are silent. A
    figure may be a function, called only where it is shown. No report holds it."""
    from pytest_gpucluster.session.reporting import progress_of

    return progress_of(request.config, request.node.name, rank=_run(request).rank)
