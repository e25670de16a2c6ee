from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.errors import EnvironmentBroken, LaunchError, OptionError
from pytest_gpucluster.inventory import (
    TOLD_BY_NVML,
    CudaGpu,
    TorchCuda,
    choose_cuda_index,
    full_uuid,
    identify,
    start_time,
)
from pytest_gpucluster.launch import RankFacts
from pytest_gpucluster.nvml import Nvml

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


@dataclass
class FakeCuda:
    """Two GPUs, which CUDA numbers the other way round than NVML does."""

    uuids: list[str] = field(default_factory=lambda: ["bb", "aa"])
    name: str = H100
    cuda_version: str | None = "13.0"

    def versions(self) -> dict[str, str | None]:
        return {"torch": "2.13.0", "cuda": self.cuda_version, "nccl": "2.29.3"}

    def visible(self) -> int:
        return len(self.uuids)

    def gpu(self, index: int) -> CudaGpu:
        return CudaGpu(name=self.name, uuid=self.uuids[index], memory_bytes=85_000_000_000)


def fake_nvml(uuids: Sequence[str] = ("GPU-aa", "GPU-bb", "GPU-cc")) -> FakeNvml:
    return FakeNvml(dict.fromkeys(uuids, HEALTHY_H100), name=H100)


class HalfWay(FakeNvml):
    """NVML that breaks after its first answer."""

    def count(self) -> int:
        raise RuntimeError("GPU is lost")


def no_nvml() -> Nvml:
    raise EnvironmentBroken("NVML is not available: NVML Shared Library Not Found")


def test_a_gpu_is_carried_from_cuda_to_nvml_by_uuid_not_by_index() -> None:
    who = identify(FACTS, "cuda", cuda=FakeCuda(), open_nvml=fake_nvml)
    assert who["cuda_index"] == 1
    assert who["gpu"] == {
        "index": 0,
        "uuid": "GPU-aa",
        "pci_bus_id": "00000000:1B:00.0",
        "name": H100,
        "memory_bytes": 85_000_000_000,
        "serial": "1650123456789",
        "vbios": "96.00.74.00.01",
        "board_part_number": "900-2G520-0000-000",
        "inforom": "G520.0200.00.05",
        "gsp_firmware": "580.65.06",
        "power_limit_watts": 700.0,
        "ecc": True,
        "mig": False,
    }
    assert (who["visible_gpus"], who["node_gpus"], who["nvml"]) == (2, 3, "")


def test_what_nvml_does_not_tell_of_a_gpu_is_none() -> None:
    without_mig = {query: value for query, value in HEALTHY_H100.items() if query != "mig.mode"}
    who = identify(FACTS, "cuda", cuda=FakeCuda(), open_nvml=lambda: FakeNvml({"GPU-aa": without_mig}))
    assert (who["gpu"]["mig"], who["gpu"]["vbios"], who["nvml"]) == (None, "96.00.74.00.01", "")
    who = identify(FACTS, "cuda", cuda=FakeCuda(), open_nvml=no_nvml)
    assert [who["gpu"][key] for key in TOLD_BY_NVML] == [None] * 8


def test_a_rank_describes_itself_in_plain_json() -> None:
    who = identify(FACTS, "cuda", cuda=FakeCuda(), open_nvml=fake_nvml)
    assert json.loads(json.dumps(who)) == who
    assert [who[key] for key in ("rank", "host", "node_rank", "local_rank", "local_world_size", "pid")] == [
        9,
        "gpu-07",
        1,
        1,
        8,
        os.getpid(),
    ]
    assert sorted(who["versions"]) == ["cuda", "driver", "nccl", "pytest_gpucluster", "python", "torch"]
    assert who["versions"]["driver"] == "580.65.06"


def test_a_rehearsal_looks_at_no_gpu_even_where_there_is_one() -> None:
    who = identify(FACTS, "cpu", cuda=FakeCuda(), open_nvml=no_nvml)
    assert who["gpu"] is None
    assert who["versions"]["driver"] is None
    assert (who["visible_gpus"], who["node_gpus"], who["nvml"]) == (0, None, "")


def test_without_nvml_the_gpu_keeps_its_uuid_and_the_reason_is_named() -> None:
    who = identify(FACTS, "cuda", cuda=FakeCuda(), open_nvml=no_nvml)
    assert who["gpu"]["uuid"] == "GPU-aa"
    assert who["gpu"]["index"] is None
    assert who["node_gpus"] is None
    assert who["versions"]["driver"] == "not available"
    assert who["nvml"] == "NVML is not available: NVML Shared Library Not Found"


def test_nvml_that_fails_half_way_is_named_and_no_crash() -> None:
    who = identify(FACTS, "cuda", cuda=FakeCuda(), open_nvml=lambda: HalfWay({"GPU-aa": HEALTHY_H100}))
    assert who["nvml"] == "NVML failed: GPU is lost"
    assert who["versions"]["driver"] == "580.65.06"
    assert who["node_gpus"] is None


def test_a_gpu_that_nvml_does_not_know_is_named() -> None:
    who = identify(FACTS, "cuda", cuda=FakeCuda(), open_nvml=lambda: fake_nvml(["GPU-bb"]))
    assert who["nvml"] == "NVML does not know GPU-aa, which CUDA shows as cuda:1"
    assert who["gpu"]["index"] is None


@pytest.mark.parametrize(
    ("uuid", "name", "expected"),
    [
        pytest.param("1f2e", H100, "GPU-1f2e", id="torch gives no prefix"),
        pytest.param("GPU-1f2e", H100, "GPU-1f2e", id="prefixed already"),
        pytest.param("1f2e", f"{H100} MIG 1g.10gb", "MIG-1f2e", id="a slice"),
    ],
)
def test_uuids_look_as_in_nvidia_smi(uuid: str, name: str, expected: str) -> None:
    assert full_uuid(uuid, name) == expected


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"),
    [
        pytest.param(0, 8, 0, id="all visible, first"),
        pytest.param(7, 8, 7, id="all visible, last"),
        pytest.param(0, 1, 0, id="one GPU, one rank"),
        pytest.param(7, 1, 0, id="the launcher shows each rank its own as cuda:0"),
    ],
)
def test_the_cuda_index_follows_what_the_launcher_shows(local_rank: int, visible: int, index: int) -> None:
    assert choose_cuda_index(replace(FACTS, local_rank=local_rank), visible) == index


def test_a_local_rank_beyond_the_gpus_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_cuda_without_a_gpu_names_rank_host_and_the_rehearsal(cuda_version: str | None, why: str) -> None:
    with pytest.raises(OptionError) as caught:
        identify(FACTS, "cuda", cuda=FakeCuda(uuids=[], cuda_version=cuda_version), open_nvml=no_nvml)
    text = str(caught.value)
    for part in ("rank 9 on gpu-07", why, "--gpucluster-device=cpu"):
        assert part in text


def test_the_real_torch_identifies_a_rank_for_a_rehearsal() -> None:
    who = identify(FACTS, "cpu")
    assert who["versions"]["torch"]
    assert json.loads(json.dumps(who)) == who
    assert TorchCuda().visible() >= 0


def test_start_time_survives_hostile_program_names(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("7 (a) b) (c) S " + " ".join(str(n) for n in range(1, 30)) + "\n", encoding="utf-8")
    # Field 3 is the S, so field 22 is the 19th number after it.
    assert start_time(stat) == 19
    assert start_time(tmp_path / "missing") is None
    stat.write_text("", encoding="utf-8")
    assert start_time(stat) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_start_time_tells_processes_apart() -> None:
    mine = start_time()
    assert mine is not None
    code = "from pytest_gpucluster.inventory import start_time; print(start_time())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(child.stdout) > mine


def test_importing_the_module_loads_neither_torch_nor_nvml() -> None:
    code = "import pytest_gpucluster.inventory, sys; print({'torch', 'pynvml'} & set(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout.strip() == "set()"
