from __future__ import annotations

import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks.training.fingerprint import fingerprint
from pytest_gpucluster.benchmarks.vision.throughput import NETWORKS, SMALLEST_SIDE, ResNet, make_resnet
from pytest_gpucluster.errors import EnvironmentBroken

CPU = torch.device("cpu")


@of_each("case", [("resnet18", 1000, 11_689_512), ("resnet50", 1000, 25_557_032), ("resnet18", 10, 11_181_642)])
def test_a_network_has_exactly_the_parameters_of_its_geometry(case):
    name, classes, parameters = case
    with torch.device("meta"):
        model = ResNet(name, classes=classes)
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    assert NETWORKS[name].parameters_with(classes) == parameters


def test_another_network_than_the_geometry_s_is_refused(monkeypatch):
    import transformers

    normal = transformers.ResNetConfig
    monkeypatch.setattr(transformers, "ResNetConfig", lambda **fields: normal(**{**fields, "depths": [2, 2, 2, 3]}))
    with torch.device("meta"), pytest.raises(EnvironmentBroken, match=r"resnet18 of [\d,]+ .* 11,689,512\. Install "):
        ResNet("resnet18")


def test_weights_follow_from_the_seed_alone_and_are_channels_last():
    state = torch.get_rng_state()
    one, two, other = (make_resnet("resnet18", CPU, classes=10, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    prints = [fingerprint(model.parameters()) for model in (one, two, other)]
    assert prints[0] == prints[1] != prints[2]
    kernel = next(weight for weight in one.parameters() if weight.shape[2:] == (7, 7))
    assert kernel.is_contiguous(memory_format=torch.channels_last)


def test_a_bottleneck_halves_the_image_in_its_3_x_3_convolution():
    with torch.device("meta"):
        model = ResNet("resnet50", classes=10)
        shapes = [model(torch.zeros(2, 3, side, side)).shape for side in (SMALLEST_SIDE, 32, 224)]
    assert shapes == [(2, 10)] * 3
    layer = model.network.resnet.encoder.stages[1].layers[0].layer
    convolutions = [module for module in layer.modules() if isinstance(module, torch.nn.Conv2d)]
    assert {one.kernel_size: one.stride for one in convolutions} == {(1, 1): (1, 1), (3, 3): (2, 2)}


@of_each("name", NETWORKS)
def test_outputs_are_those_of_the_layers_and_no_fewer_for_other_sides(name):
    counts = []
    for side in (224, 448, 100, 32, SMALLEST_SIDE):
        with torch.device("meta"):
            model, found = ResNet(name), []
            for module in model.modules():
                if not list(module.children()) and not isinstance(module, torch.nn.Identity):
                    module.register_forward_hook(
                        lambda module, given, output, found=found: found.append(output.numel())
                    )
            model(torch.empty(2, 3, side, side))
        counts.append((sum(found) // 2, NETWORKS[name].outputs_with(side)))
    assert counts[0][0] == counts[0][1] == NETWORKS[name].outputs
    assert all(0.9 * least <= estimate <= 1.6 * least for least, estimate in counts), counts
