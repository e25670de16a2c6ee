"""How many images per second does each GPU train on, and does the loader keep up?"""

from functools import partial

import pytest

from pytest_gpucluster.benchmarks.vision.datasets import SyntheticImages, open_images
from pytest_gpucluster.benchmarks.vision.throughput import Setup, image_rate

MODELS = ["resnet18", "resnet50"]
INSTALL = "is not installed: pip install -c constraints.txt -e '.[vision]'"
SYNTHETIC_ROWS = 1_281_167  # ImageNet's training set
SETUP_SECONDS = 180.0  # opening the data, starting the workers, choosing convolutions, the first steps


@pytest.fixture(autouse=True)
def deadline(request, cluster, workload):
    """Give a test the time that its workload may take."""
    sampling = workload.vision.sampling
    seconds = SETUP_SECONDS + sampling.warmup_seconds + sampling.at_most_seconds
    request.node.add_marker(pytest.mark.deadline(seconds))
    cluster.allow(seconds)


@pytest.fixture
def train(cluster, workload, telemetry, measure):
    """Train a model on images, and measure it."""

    def train(model, images):
        sizes = workload.vision
        if model not in sizes.models:
            pytest.skip(f"the workload's vision.models are {', '.join(sizes.models)}")
        window = telemetry()
        result = image_rate(
            cluster.group,
            cluster.device,
            Setup(network=model, batch=sizes.batch, workers=sizes.workers, prefetch=sizes.prefetch),
            images,
            node=cluster.node_rank,
            sampling=sizes.sampling,
            during=window,
        )
        labels = {
            "model": model,
            "data": result.data,
            "batch": sizes.batch,
            "workers": sizes.workers,
            "prefetch": sizes.prefetch,
        }
        measure(
            "vision.images_per_second",
            result.images_per_second,
            unit="images/s",
            telemetry=window.summary(),
            **labels,
        )
        measure("vision.data_wait", result.data_wait_ratio, unit="ratio", samples=result.data_wait, **labels)
        measure("vision.loss_ratio", result.loss_ratio, unit="ratio", **labels)

    return train


@pytest.mark.training
@pytest.mark.criterion("vision.throughput")
@pytest.mark.parametrize("model", MODELS)
def test_vision_throughput(model, train, workload):
    """Accepted: all ranks together train a ResNet on synthetic images, which a multi-worker loader hands over: every
    loss is finite, it falls, and at the end all ranks have the same weights. /dev/shm of each node is large enough for
    the workers of all its ranks. Images/s of each GPU and its wait for data are recorded.

    Why: convolutions load a GPU differently from matrix products, and the loader depends on CPUs, host memory and PCIe.
    A /dev/shm of 64 MB, as containers have by default, kills workers by SIGBUS hours into a job; here it is measured
    before the first one is started.

    When it fails: /dev/shm: the message names the node, the size that it needs and how to set it. A high data_wait:
    more workers (``vision.workers``), or CPUs that the launcher keeps from the ranks (``test_affinity``). Different
    weights or a loss that is not finite: as for ``test_ddp``.

    On cpu this rehearses with small images and gloo.
    """
    pytest.importorskip("transformers", reason=f"transformers {INSTALL}")
    train(model, partial(SyntheticImages, SYNTHETIC_ROWS, workload.vision.image_size))


@pytest.mark.training
@pytest.mark.needs_data("images")
@pytest.mark.criterion("vision.data")
@pytest.mark.parametrize("model", MODELS)
def test_vision_data(model, train, workload, settings):
    """Accepted: the same on images of your own (``--gpucluster-data images=FOLDER``), read and decoded by the workers:
    FashionMNIST, or one folder for each class with JPEG or PNG files in it. The loss does not diverge, and
    no image is left out: a broken one is an error that names its file.

    Why: with real files the storage and the decoding on the CPUs decide, as in your own training. Data sets of one size
    keep it, so images/s compare with runs on the same data only.

    When it fails: the named file or folder. A high data_wait: the storage, or too few workers or CPUs.
    """
    pytest.importorskip("transformers", reason=f"transformers {INSTALL}")
    pytest.importorskip("PIL", reason=f"Pillow {INSTALL}")
    train(model, partial(open_images, settings.data["images"].path, side=workload.vision.image_size))
