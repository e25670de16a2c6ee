"""How fast is training: full steps of a decoder, on all GPUs together?"""

import pytest

from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.throughput import throughput
from pytest_gpucluster.benchmarks.training.throughput_setup import Setup
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.errors import MeasurementError

SETUP_SECONDS = 420.0  # making the model, compiling, the first steps, and the steps in which the parts are timed


@pytest.fixture(autouse=True)
def deadline(request, cluster, workload):
    """Give the measurement the time that its workload may take."""
    sampling = workload.throughput.sampling
    seconds = SETUP_SECONDS + sampling.warmup_seconds + sampling.at_most_seconds
    request.node.add_marker(pytest.mark.deadline(seconds))
    cluster.allow(seconds)


@pytest.fixture
def setup(strategy, model, workload):
    """What is trained, and how."""
    sizes = {
        "contract": workload.throughput_contract,
        "large": workload.throughput_large if strategy == "ddp" else workload.throughput_sharded,
    }[model]
    how = workload.throughput
    return Setup(
        geometry=Geometry.of(sizes),
        strategy=strategy,
        batch=sizes.batch,
        compiled=how.compiled == "on",
        recompute=sizes.recompute == "on",
        workers=how.workers,
        prefetch=how.prefetch,
    )


def describe(setup):
    """Describe in a line what is trained, and how."""
    sizes, again = setup.geometry, ", blocks recomputed" if setup.recompute else ""
    shape = f"{sizes.layers} layers, {sizes.width} wide, vocabulary {sizes.vocab}"
    how = f"by {setup.strategy}{again}, {setup.batch} x {sizes.sequence} tokens a step"
    return (
        f"{sizes.parameters / 1e6:.4g}M parameters, {shape}, {how}, {setup.workers} workers, prefetch {setup.prefetch}"
    )


def peak_flops(gpu, cluster, limits, labels):
    """Return what the GPU can do at most in bf16 by its data sheet; None where no limit needs it.

    Where MFU has a limit, a GPU without a data sheet peak is an error.
    """
    if gpu.peaks is not None:
        return gpu.peaks.bf16_tflops * 1e12
    limit = None
    if gpu.sku is not None:
        where = {"world_size": cluster.world_size, "nnodes": cluster.nnodes, "labels": labels}
        limit = limits.limit("training.mfu", sku=gpu.sku, **where)
    if limit is None or limit.record_only is None:
        raise MeasurementError(
            f"training.mfu cannot be measured on {gpu.name} ({gpu.sku or 'an unknown SKU'}): no data sheet peak is "
            "known. Add the SKU to metrics/datasheets.py, or set record_only for training.mfu in your limits"
        )
    return None


@pytest.mark.training
@pytest.mark.criterion("training.throughput")
@pytest.mark.parametrize("model", ["contract", "large"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_throughput(
    strategy, model, setup, cluster, gpu, workload, limits, telemetry, measure, progress, record_property
):
    """Accepted: on every rank the tokens/s of full training steps, and for the large model the MFU, reach their limits,
    while the loss falls, all weights move, and with ddp all ranks keep the same ones.

    Why: this is what the cluster is for. All parts are in it: data loading, bf16 products, flash attention, the
    exchange of gradients and weights, the optimizer. The contract model is small, and its limit the one of the
    contract; the large one fills a GPU. With fsdp each rank has only a part of it.

    When it fails: look at ``training.parts`` of each rank. A long data_wait: more ``workers`` or ``prefetch``. A long
    exposed_communication on all ranks: ``-k nccl``; on all but one rank: that one is slow, and the others wait for it.
    A long forward and backward: ``-k matmul``, clocks and throttle reasons. ``compiled=no``: there is no compiler, see
    the note. docs/training.md shows how to try other settings.

    On cpu this rehearses tiny models with gloo, and nothing is compiled unless asked for.
    """
    needed, available = setup.needed_bytes(cluster.world_size), accelerator(cluster.device).total_bytes()
    if available is not None and needed > available:
        # The remedy comes first: a report may shorten the reason.
        pytest.skip(
            f"needs about {needed / 1e9:.3g} GB on each of {cluster.world_size} ranks, and {cluster.device} has "
            f"{available / 1e9:.3g} GB: take more GPUs, or a smaller model "
            f"(--gpucluster-workload training.throughput...); {describe(setup)}"
        )
    window = telemetry()
    result = throughput(
        cluster.group,
        cluster.device,
        setup,
        sampling=workload.throughput.sampling,
        during=window,
        progress=progress,
    )
    record_property("training.model", f"{describe(setup)}, on each of {cluster.world_size} GPUs")
    record_property("training.flops_per_token", str(setup.geometry.training_flops_per_token))
    for number, note in enumerate(result.notes, start=1):
        print(f"note: {note}")
        record_property(f"training.note.{number}", note)

    labels = {
        "strategy": strategy,
        "model": model,
        "tokens_per_step": setup.tokens * cluster.world_size,
        "compiled": "yes" if result.compiled else "no" if setup.compiled else "off",
    }
    summary = window.summary()
    rate = result.tokens_per_second
    measure("training.tokens_per_second", rate, unit="tokens/s", telemetry={**summary, "notes": result.notes}, **labels)
    measure("training.step_time", result.step_seconds, unit="s", record_only=True, **labels)
    measure("training.step_time_p99", result.p99_seconds, unit="s", record_only=True, **labels)
    for part, seconds in result.parts.items():
        measure("training.parts", seconds, unit="s", record_only=True, part=part, **labels)
    peak, flops = peak_flops(gpu, cluster, limits, labels), setup.geometry.training_flops_per_token
    if peak is not None:
        measure("training.tflops", rate.scaled(flops / 1e12), unit="TFLOPS", record_only=True, **labels)
        measure("training.mfu", rate.scaled(flops / peak), unit="ratio", telemetry=summary, **labels)
