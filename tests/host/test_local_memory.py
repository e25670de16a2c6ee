"""Memory beside the GPU is fine, memory elsewhere is an error, and what is not known fails nobody."""

from __future__ import annotations

import pytest
from fake_host import who

from pytest_gpucluster.affinity import Place
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.host.local_memory import require_local

WHO = who(5, pci="00000000:3B:00.0")
NODE_1 = Place(cpus=frozenset({64}), nodes=frozenset({1}))


@pytest.mark.parametrize("nodes", [{1: 1.0}, {1: 0.96, 0: 0.04}, {}], ids=["all", "nearly all", "not told"])
def test_memory_on_the_gpu_s_node_is_fine(nodes: dict[int, float]) -> None:
    require_local(WHO, nodes, NODE_1)
    require_local(WHO, {0: 1.0}, None)


@pytest.mark.parametrize(("nodes", "told"), [({0: 1.0}, "0 %"), ({0: 0.5, 1: 0.5}, "50 %")], ids=["none", "half"])
def test_memory_elsewhere_is_an_error_that_names_gpu_node_and_part(nodes: dict[int, float], told: str) -> None:
    with pytest.raises(EnvironmentBroken) as caught:
        require_local(WHO, nodes, NODE_1)
    message = str(caught.value)
    assert "GPU 5 (GPU-5, serial unknown, PCI 00000000:3B:00.0) on gpu-07" in message
    assert f"{told} of the host memory of rank 5 lay on NUMA node 1" in message
    assert "numactl" in message
