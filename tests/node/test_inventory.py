import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from complaints import in_order
from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.errors import EnvironmentBroken, LaunchError, OptionError
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.node import nvml
from pytest_gpucluster.node.inventory import NVML_QUERIES, choose_cuda_index, full_uuid, identify

FACTS = RankFacts(
    rank=9,
    world_size=16,
    local_rank=1,
    local_world_size=8,
    node_rank=1,
    nnodes=2,
    hostname="gpu-07",
    launcher="torchrun",
    run_id="a1",
)
H100 = "NVIDIA H100 80GB HBM3"


def fake_torch(uuids=("bb", "aa"), cuda_version="13.0"):
    """Return a torch with two GPUs, which CUDA numbers the other way round than NVML does."""
    cuda = SimpleNamespace(
        is_available=lambda: bool(uuids),
        device_count=lambda: len(uuids),
        get_device_properties=lambda index: SimpleNamespace(name=H100, uuid=uuids[index], total_memory=85 * 10**9),
        nccl=SimpleNamespace(version=lambda: (2, 29, 3)),
    )
    distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: True)
    version = SimpleNamespace(cuda=cuda_version)
    return SimpleNamespace(__version__="2.13.0", version=version, cuda=cuda, distributed=distributed)


def fake_nvml(uuids=("GPU-aa", "GPU-bb", "GPU-cc")):
    return FakeNvml(dict.fromkeys(uuids, HEALTHY_H100), name=H100)


class HalfWay(FakeNvml):
    """NVML that breaks after its first answer."""

    def gpus(self):
        raise RuntimeError("GPU is lost")


def no_nvml():
    raise EnvironmentBroken("NVML is not available: NVML Shared Library Not Found")


def identified(facts, device, torch, open_nvml):
    """What the rank says of itself with this torch and NVML."""
    with patch.dict(sys.modules, torch=torch), patch.object(nvml, "MAKER", open_nvml):
        return identify(facts, device)


def test_a_gpu_is_carried_from_cuda_to_nvml_by_uuid_not_by_index():
    who = identified(FACTS, "cuda", fake_torch(), fake_nvml)
    assert who["cuda_index"] == 1
    gpu = who["gpu"]
    assert (gpu["index"], gpu["uuid"], gpu["pci_bus_id"], gpu["name"]) == (0, "GPU-aa", "00000000:1B:00.0", H100)
    assert (gpu["memory_bytes"], gpu["power_limit_watts"], gpu["ecc"], gpu["mig"]) == (85 * 10**9, 700.0, True, False)
    values = [gpu[key] for key in ("serial", "vbios", "board_part_number", "inforom", "gsp_firmware")]
    assert values == ["1650123456789", "96.00.74.00.01", "900-2G520-0000-000", "G520.0200.00.05", "580.65.06"]
    assert json.loads(json.dumps(who)) == who
    assert [who[key] for key in ("rank", "host", "node_rank", "local_rank", "pid")] == [9, "gpu-07", 1, 1, os.getpid()]
    assert sorted(who["versions"]) == ["cuda", "driver", "nccl", "pytest_gpucluster", "python", "torch"]
    assert (who["visible_gpus"], who["node_gpus"], who["nvml"]) == (2, 3, "")


def test_what_nvml_does_not_report_of_a_gpu_is_none():
    without_mig = {query: value for query, value in HEALTHY_H100.items() if query != "mig.mode"}
    who = identified(FACTS, "cuda", fake_torch(), lambda: FakeNvml({"GPU-aa": without_mig}))
    assert (who["gpu"]["mig"], who["gpu"]["vbios"], who["nvml"]) == (None, "96.00.74.00.01", "")
    who = identified(FACTS, "cuda", fake_torch(), no_nvml)
    assert [who["gpu"][key] for key in NVML_QUERIES] == [None] * 8


def test_a_rehearsal_looks_at_no_gpu_even_where_there_is_one():
    who = identified(FACTS, "cpu", fake_torch(), no_nvml)
    assert who["gpu"] is None
    assert who["versions"]["driver"] is None
    assert (who["visible_gpus"], who["node_gpus"], who["nvml"]) == (0, None, "")


@pytest.mark.parametrize(
    ("open_nvml", "driver", "words"),
    [
        (no_nvml, "not available", "NVML Shared Library Not Found"),
        (lambda: HalfWay({"GPU-aa": HEALTHY_H100}), "580.65.06", "GPU is lost"),
        (lambda: fake_nvml(["GPU-bb"]), "580.65.06", "NVML GPU-aa CUDA cuda:1"),
    ],
    ids=["no NVML", "NVML that fails half way", "a GPU that it does not know"],
)
def test_a_failure_of_nvml_is_named_and_the_gpu_keeps_its_uuid(open_nvml, driver, words):
    who = identified(FACTS, "cuda", fake_torch(), open_nvml)
    assert who["gpu"]["uuid"] == "GPU-aa"
    assert who["versions"]["driver"] == driver
    assert in_order(who["nvml"], words)
    if "580" not in driver:
        assert (who["gpu"]["index"], who["node_gpus"]) == (None, None)


def test_uuids_look_as_in_nvidia_smi():
    for uuid in ("1f2e", "GPU-1f2e"):  # torch gives no prefix
        assert full_uuid(uuid, H100) == "GPU-1f2e"
    assert full_uuid("1f2e", f"{H100} MIG 1g.10gb") == "MIG-1f2e"


def test_the_cuda_index_follows_what_the_launcher_shows():
    # The last one: the launcher shows each rank its own as cuda:0.
    for local_rank, visible, index in ((0, 8, 0), (7, 8, 7), (0, 1, 0), (7, 1, 0)):
        assert choose_cuda_index(replace(FACTS, local_rank=local_rank), visible) == index


def test_a_local_rank_beyond_the_gpus_is_an_error_with_the_way_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(LaunchError) as caught:
        choose_cuda_index(replace(FACTS, local_rank=3), 2)
    text = str(caught.value)
    assert "rank 9 on gpu-07: LOCAL_RANK=3 is beyond the 2 GPUs" in text
    assert "CUDA_VISIBLE_DEVICES='4,5'" in text
    assert "--nproc-per-node=2" in text


@pytest.mark.parametrize(
    ("cuda_version", "why"),
    [
        pytest.param(None, "torch 2.13.0 is built without CUDA", id="cpu build"),
        pytest.param("13.0", "torch 2.13.0 (CUDA 13.0) finds no usable GPU", id="no GPU"),
    ],
)
def test_cuda_without_a_gpu_names_rank_host_and_the_rehearsal(cuda_version, why):
    with pytest.raises(OptionError) as caught:
        identified(FACTS, "cuda", fake_torch([], cuda_version), no_nvml)
    text = str(caught.value)
    for part in ("rank 9 on gpu-07", why, "--gpucluster-device=cpu"):
        assert part in text
