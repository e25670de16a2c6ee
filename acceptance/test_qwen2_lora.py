"""Does LoRA fine-tuning converge on these GPUs, and how fast is it?"""

import importlib.util
from collections import Counter
from dataclasses import replace

import pytest

from pytest_gpucluster.benchmarks.lora.experiment import last_step, training_deadline
from pytest_gpucluster.benchmarks.lora.hub import INSTALL
from pytest_gpucluster.benchmarks.lora.model import QWEN2_LABEL, TINY_LABEL, NodeWeights, given_base, random_base
from pytest_gpucluster.benchmarks.lora.reference_curve import deviation, read
from pytest_gpucluster.benchmarks.lora.training_plan import Plan, Recipe, crosses_links, group_size
from pytest_gpucluster.errors import CurveError

SECTIONS = {"test_lora_tiny": "lora_tiny", "test_qwen2_lora": "qwen2_lora", "test_lora_of_model": "qwen2_lora"}
TRAINED_BY = {TINY_LABEL: "test_lora_tiny", QWEN2_LABEL: "test_qwen2_lora"}
SETUP_SECONDS = 1200.0  # making, moving and sharding a model of 7.6e9 weights, and compiling its blocks
STEPS_AT_MOST = 1_000_000
OF_ALL_STEPS = ("lora.final_loss", "lora.all_token_loss", "lora.held_out_ratio")
"""Judged where no step is left out: else the reference curve judges."""
NO_LINK = "groups of {} ranks are trained, which cross no link between nodes, or between the GPUs of a single one"
measured = {}
"""tokens_per_second: of the slowest GPU, where this run has measured it: the trainings after it are predicted by it."""


@pytest.fixture(autouse=True)
def extra():
    """Without transformers and peft there is nothing to run."""
    missing = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed; install them with {INSTALL}")


@pytest.fixture
def nodes(inventory):
    """The node of each rank."""
    return [who["node_rank"] for who in inventory]


@pytest.fixture(autouse=True)
def deadline(request, cluster, nodes, workload):
    """Give each test the time that its workload may take."""
    section = SECTIONS.get(request.node.originalname)
    sampling = workload.lora_throughput.sampling
    seconds = SETUP_SECONDS + sampling.warmup_seconds + sampling.at_most_seconds
    if section == "lora_tiny":
        seconds = workload.lora_tiny.deadline_seconds
    elif section is not None:
        rate = measured.get("tokens_per_second")
        seconds = training_deadline(workload.qwen2_lora, workload.lora.recipe, nodes, rate)
    request.node.add_marker(pytest.mark.deadline(seconds))
    cluster.allow(seconds)


@pytest.fixture
def peak_tflops(gpu):
    """Dense bf16 of this GPU's data sheet; None where none is known."""
    return gpu.peaks.bf16_tflops if gpu.peaks is not None else None


@pytest.fixture
def reference_curve(request, cluster, settings):
    """The reference curve for a model's training, on call; None where there is none, or where it is of a model that
    another test of this run trains. A reference curve that no test would compare is an error."""

    def curve_of(label):
        if settings.reference_curve is None:
            return None
        curve = read(settings.reference_curve)
        model = curve.context.get("model", "an unknown model")
        if model == label:
            return curve
        trains = TRAINED_BY.get(model, "test_lora_of_model")
        has_inputs = trains == "test_lora_tiny" or (settings.model is not None and "function_calls" in settings.data)
        has_gpu = trains != "test_qwen2_lora" or cluster.has_gpus
        others = {getattr(item, "originalname", "") for item in request.session.items} - {request.node.originalname}
        if trains in others and has_inputs and has_gpu:
            return None
        raise CurveError(
            f"{settings.reference_curve} is a reference curve of {model}, and no test of this run trains "
            f"{model}: nothing would be compared. {trains} does, with the model and the data that the curve is of; or "
            "leave the option out"
        )

    return curve_of


@pytest.fixture
def given(cluster, nodes, settings, workload, reference_curve):
    """What makes the base and the data that the options name, on call: a download is part of the test. The weights are
    read once on each node."""
    from pytest_gpucluster.benchmarks.lora.experiment import given_data, given_experiment

    if settings.model is None or "function_calls" not in settings.data:
        reference_curve(None)
        pytest.skip(
            "give the weights and the data: --gpucluster-model FOLDER or Qwen/Qwen2-7B@COMMIT, and "
            "--gpucluster-data function_calls=FILE or glaiveai/glaive-function-calling-v2"
        )

    def base():
        return given_base(settings.model.name, path=settings.model.path, revision=settings.model.revision)

    def weights(base):
        if len(set(Counter(nodes).values())) > 1:
            return base  # there is no group of a node then
        return replace(base, weights=NodeWeights(base.folder, cluster.node_group(nodes)))

    def data(base):
        source = settings.data["function_calls"]
        found = given_data(source.path or source.name, sha256=source.sha256, revision=source.revision)
        return given_experiment(workload.qwen2_lora, base, found, workload.lora.recipe, workload.lora.rendering)

    return base, lambda base: (weights(base), data(base))


@pytest.fixture
def train(
    cluster, nodes, settings, workload, reference_curve, artifacts, progress, measure, peak_tflops, record_property
):
    """Train, record every condition as a measurement, and write the loss curve into the test's folder step by step."""
    from pytest_gpucluster.benchmarks.lora.convergence import converge, figures_of
    from pytest_gpucluster.benchmarks.lora.experiment import recipe_of

    def train(sizes, base, data):
        recipe, expected = recipe_of(sizes, base, workload.lora.recipe), reference_curve(base.label)
        ranks = group_size(nodes, recipe.global_batch)
        group = f"group-{cluster.rank // ranks}"
        folder = (settings.scratch or artifacts) / base.label
        result = converge(
            cluster.group,
            cluster.subgroups(ranks),
            cluster.subgroups(1),
            cluster.device,
            base=base,
            recipe=recipe,
            sizes=sizes,
            data=data,
            folder=folder / group,
            final=folder / f"final-{group}",
            resume=settings.resume,
            reference=expected,
            curves=artifacts,
            progress=progress,
        )
        notes = [*result.rate.notes, *([] if crosses_links(nodes, ranks) else [NO_LINK.format(ranks)])]
        for name, text in (("base", base.origin), ("data", data.origin), ("notes", "; ".join(notes))):
            record_property(f"lora.{name}", text or "none")
        some = last_step(sizes) < sizes.steps
        for metric, value, unit, labels in figures_of(result, peak_tflops=peak_tflops):
            measure(metric, value, unit=unit, record_only=some and metric in OF_ALL_STEPS, **labels)
        if expected is not None and "all_token_loss" in result.result:
            far, where = deviation(expected, result.curve, steps=last_step(sizes))
            print(f"reference curve: {where}")
            measure("lora.reference_deviation", far, unit="ratio", model=base.label)

    return train


@pytest.mark.last
@pytest.mark.training
@pytest.mark.criterion("lora_tiny")
def test_lora_tiny(workload, train):
    """Accepted: a tiny model with a random base learns synthetic function calls in 100 steps, and every condition
    holds, each a measurement of its own: losses and gradients' norms are finite; the mean of the last 10 losses keeps
    the limit, and the loss of held-out blocks falls; all adapters have moved, and the base has not, bit by bit; some
    steps equal those of one rank with the same global batch; steps after a checkpoint, taken again, give the same
    weights bit by bit; what is saved gives the same loss when it is read again. Groups that train at once agree.

    Why: a loss below a limit does not show ranks that do not share gradients or read the same data, a flipped bit, or
    a loss too large by the number of ranks. This test never satisfies the Qwen2 criterion.

    When it fails: the failing measurement says what is wrong. ``lora.loss_error`` or ``lora.gradient_error``: repeat
    ``-k ddp`` and ``-k nccl``. ``lora.replayed_steps`` or ``lora.unchanged_base``: memory or arithmetic of the named
    rank's GPU: run the vendor's diagnostics (``dcgmi diag -r 3``); on all ranks at once: sums in the NVLink switch are
    not repeatable, so try ``NCCL_NVLS_ENABLE=0`` first. docs/lora.md explains all of them.

    On cpu the same model is trained, over gloo.
    """
    from pytest_gpucluster.benchmarks.lora.experiment import tiny_experiment

    train(workload.lora_tiny, *tiny_experiment(workload.lora_tiny, workload.lora.recipe))


@pytest.mark.last
@pytest.mark.training
@pytest.mark.needs_gpu
@pytest.mark.criterion("qwen2_lora.throughput")
def test_qwen2_lora_throughput(cluster, nodes, workload, telemetry, progress, measure, peak_tflops, record_property):
    """Accepted: LoRA fine-tuning of a model of Qwen2-7B's sizes reaches the tokens/s and the part of the bf16 peak that
    the limits ask for, on the slowest GPU, within the GPUs' memory.

    Why: 2,000 tokens/s on each GPU is what was promised; it is some 6 % of an H100's peak, so the part of the peak has
    a limit too. The weights are random, since neither depends on them: convergence is not judged.

    When it fails: one GPU: its clocks and power are recorded with the measurement. All: look at whether activations
    were recomputed and blocks compiled, in the labels and notes; then ``-k matmul``, ``-k hbm`` and ``-k nccl``.
    """
    from pytest_gpucluster.benchmarks.group import Ranks
    from pytest_gpucluster.benchmarks.lora.throughput import lora_throughput

    sizes, base = workload.lora_throughput, random_base()
    ranks = group_size(nodes, cluster.world_size)
    recipe = Recipe(
        steps=STEPS_AT_MOST,
        warmup_steps=1,
        global_batch=ranks * sizes.micro_batch * sizes.accumulation,
        micro_batch=sizes.micro_batch,
        learning_rate=base.adapters.learning_rate,
        recompute=sizes.recompute,
        compiled=sizes.compiled == "on",
    )
    group = cluster.subgroups(ranks)
    plan = Plan(base=base, recipe=recipe, sequence=sizes.sequence, ranks=ranks)
    _, why_not = plan.choose_recompute(Ranks(cluster.group, cluster.device), cluster.device)
    if why_not:
        pytest.skip(why_not)
    window = telemetry()
    result = lora_throughput(
        group,
        cluster.device,
        base=base,
        recipe=recipe,
        sequence=sizes.sequence,
        sampling=sizes.sampling,
        during=window,
        progress=progress,
    )
    measured["tokens_per_second"] = min(cluster.all_gather_object(result.tokens_per_second.median))
    record_property("lora.base", base.origin)
    record_property("lora.notes", "; ".join(result.notes) or "none")
    labels = {
        "model": base.label,
        "micro_batch": str(sizes.micro_batch),
        "sequence": str(sizes.sequence),
        "group_ranks": str(ranks),
    }
    for metric, value, unit, its in result.figures(peak_tflops, labels):
        measure(metric, value, unit=unit, telemetry=window.summary(), **its)


@pytest.mark.last
@pytest.mark.training
@pytest.mark.needs_hardware
@pytest.mark.criterion("qwen2_lora")
def test_qwen2_lora(given, nodes, reference_curve, workload, train):
    """Accepted: Qwen2-7B learns function calls with LoRA (rank 64, alpha 128, dropout 0.05, all seven linear layers,
    161,480,704 trained parameters) in 100 steps of 128 blocks: the conditions of ``test_lora_tiny``, a final loss below
    0.5, and more than 2,000 tokens/s on each GPU. Groups of up to 16 GPUs, each of several nodes where there are
    several, train at once, and must agree.

    Why: this is the workload that the cluster is bought for, at full size. FSDP2 shards as DeepSpeed's ZeRO-3 does.

    When it fails: as ``test_lora_tiny``. Too slow: ``-k training``, ``-k matmul`` and ``-k nccl`` first. Not run: it
    needs the weights (``--gpucluster-model``) and the data (``--gpucluster-data``). Out of memory: the error states how
    much is needed.
    """
    ranks = group_size(nodes, workload.qwen2_lora.global_batch)
    if not crosses_links(nodes, ranks):
        pytest.skip(f"{NO_LINK.format(ranks)}, and this criterion is about them: use another number of nodes or GPUs")
    base = given[0]()
    if base.label != QWEN2_LABEL:
        reference_curve(None)
        pytest.skip(f"{base.origin} does not have Qwen2-7B's sizes; test_lora_of_model trains it, for no criterion")
    last, steps = last_step(workload.qwen2_lora), workload.qwen2_lora.steps
    if last < steps and reference_curve(base.label) is None:
        pytest.skip(
            f"{last} of {steps} steps are judged by a reference curve: give --gpucluster-reference-curve, made of runs "
            "of all steps, or take all of them (--gpucluster-profile=full)"
        )
    train(workload.qwen2_lora, *given[1](base))


@pytest.mark.last
@pytest.mark.training
def test_lora_of_model(given, reference_curve, workload, train):
    """No criterion: any other model of type qwen2 or qwen3 is trained as Qwen2-7B would be, under its own name."""
    base = given[0]()
    if base.label == QWEN2_LABEL:
        reference_curve(None)
        pytest.skip("test_qwen2_lora trains it")
    train(workload.qwen2_lora, *given[1](base))
