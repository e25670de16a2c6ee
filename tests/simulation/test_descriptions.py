"""Descriptions of simulated clusters, and faults: what is read, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.judge import loader
from pytest_gpucluster.simulation import cluster, faults


def test_every_shipped_description_has_a_gpu_with_limits():
    limits = loader.load()
    for name in cluster.shipped():
        found = cluster.load(name)
        assert limits.sku_for(found.gpu.name) == found.sku, name
        assert name.startswith(f"{found.nodes}x{found.gpus_per_node}x")
        assert len(found.hosts) == found.nodes
        assert {port for gpu in range(found.gpus_per_node) for port in found.ports_of(gpu)} == {*found.ports}


def test_another_shape_of_a_known_gpu():
    found = cluster.load("3x4xh100")
    assert (found.nodes, found.gpus_per_node, found.sku) == (3, 4, "H100 SXM")
    assert [found.ports_of(gpu) for gpu in (0, 3)] == [("mlx5_0", "mlx5_1"), ("mlx5_6", "mlx5_7")]


@pytest.mark.parametrize("gpus", range(1, 17))
@pytest.mark.parametrize("ports", [0, 1, 2, 8])
def test_every_port_is_of_a_gpu_so_that_a_fault_of_any_of_them_acts(gpus, ports):
    like = cluster.load(f"2x{gpus}xH100")
    found = replace(like, node=replace(like.node, ports=ports))
    of_each = [found.ports_of(gpu) for gpu in range(gpus)]
    assert {port for of_gpu in of_each for port in of_gpu} == {*found.ports}
    assert all(of_each) == bool(ports)


@pytest.mark.parametrize(
    "text", [faults.EXAMPLES[kind.where].replace("NAME", name) for name, kind in faults.KINDS.items()]
)
def test_every_fault_is_read_as_it_is_written(text):
    found = faults.parse(text)
    assert str(found) == text
    assert faults.parse(str(found)) == found
    assert cluster.load("2x8xH100").with_faults([found]).faults.all == (found,)


def test_every_fault_acts_somewhere():
    modules = [path.read_text() for path in Path(faults.__file__).parent.glob("*.py") if path.name != "faults.py"]
    assert not [name for name in faults.KINDS if not any(f'"{name}"' in text for text in modules)]


def test_an_amount_is_a_ratio_seconds_or_watts():
    assert faults.parse("slow-gpu:a/0=20%").amount == 0.2
    assert faults.parse("power-cap:a=400W").amount == 400
    assert faults.parse("throttle:a/0=60s").amount == 60
    assert str(faults.parse("slow-gpu:a/0=20%")) == "slow-gpu:a/0=20%"


def test_a_fault_is_found_at_its_place_only():
    has = faults.Faults(
        (faults.parse("slow-gpu:gpu-01/3=20%"), faults.parse("slow-host:gpu-00"), faults.parse("nvls-off"))
    )
    assert has.amount("slow-gpu", "gpu-01", 3) == 0.2
    assert has.amount("slow-gpu", "gpu-01", 2) is None
    assert has.amount("slow-gpu", "gpu-00", 3) is None
    assert has.amount("slow-host", "gpu-00", 7) == 0.15
    assert has.amount("nvls-off") == 1.0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("slowgpu:gpu-00/1", "'slow-gpu'"),
        ("slow-gpu:gpu-00", "slow-gpu:gpu-01/3"),
        ("slow-gpu:gpu-00/1=3s", "in %"),
        ("slow-files=abc", "slow-files=0.05s"),
        ("ecc:gpu-00/1=3%", "no amount"),
        ("slow-gpu:gpu-00/1=0%", "above 0 %"),
        ("slow-gpu:gpu-00/1=100%", "below 100 %"),
        ("hbm:gpu-00/1=150%", "below 100 %"),
        ("wrong-product:gpu-00/1=0", "above 0"),
        ("power-cap:gpu-00=1.2.3W", "a number"),
        ("nic-down:gpu-00/mlx5_0", "nic-down:gpu-01"),
        ("power-cap:gpu-00=700W", "no less than the 700 W"),
        ("slow-gpu:gpu-07/1", "gpu-00, gpu-01"),
        ("slow-gpu:gpu-00/8", "0, 1, 2, 3, 4, 5, 6, 7"),
        ("dead-rail:gpu-00/mlx5_9", "mlx5_0"),
        ("", "known are"),
    ],
)
def test_a_wrong_fault_is_refused(text, names):
    with pytest.raises(OptionError, match=names):
        cluster.load("2x8xH100").with_faults([faults.parse(text)])


@pytest.mark.parametrize("what", ["2x8xH10", "nowhere.yaml", "0x8xH100", "2x8"])
def test_an_unknown_cluster_is_refused_with_those_that_are_known(what):
    with pytest.raises(OptionError, match="2x8xH100"):
        cluster.load(what)


def test_a_file_is_like_another_one_with_faults(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "schema_version: 1\nlike: 2x8xH100\nnodes: 4\nseed: 7\nspread: 1 %\ngpu: {power_limit: 500 W}\n"
        "rates: {matmul.bf16.tflops: 0.7 PFLOPS}\nfaults: [slow-gpu:gpu-03/3]\n"
    )
    found = cluster.load(str(path))
    assert (found.name, found.nodes, found.seed, found.spread) == ("mine", 4, 7, 0.01)
    assert found.gpu.power_limit_watts == 500
    assert found.gpu.name == "NVIDIA H100 80GB HBM3"
    assert found.rates == {"matmul.bf16.tflops": 700.0}
    assert found.faults.amount("slow-gpu", "gpu-03", 3) == 0.1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes: 2\n", ":1:1: .* missing"),
        ("schema_version: 1\nlike: 2x8xH100\nnodes: two\n", ":3:8: .*whole number"),
        ("schema_version: 1\nlike: 2x8xH100\ngpus: 2\n", ":3:1: .*gpus_per_node"),
        ("schema_version: 1\nlike: 2x8xH100\nfaults: [slow-gpu:gpu-09/1]\n", ":3:10: .*gpu-00"),
        ("schema_version: 1\nlike: 2x8xH100\nsku: H1000\n", ":3:6: .*H100"),
        ("schema_version: 1\nlike: 2x8xH100\ngpu: {memory: 80}\n", ":3:15: "),
        ("schema_version: 1\nlike: 2x8xH100\nrates: {matmul.bf15.tflops: 1 TFLOPS}\n", ":3:9: .*matmul.bf16"),
        ("schema_version: 1\nlike: 2x8xH100\nhost_names: gpu\n", ":3:13: .*of their own"),
        ("schema_version: 1\nlike: 2x8xH100\nnodes: 0\n", ":3:8: .*above zero"),
        ("schema_version: 1\nlike: 2x8xH100\nrates: {hbm.copy.bandwidth: 0 TB/s}\n", ":3:29: .*above zero"),
        ("schema_version: 1\nlike: 2x8xH100\nhost_names: 'gpu-{x}'\n", ":3:13: .*of their own"),
        ("schema_version: 1\nsku: H100 SXM\n", "nodes, gpus_per_node, gpu, node, nccl are missing"),
        ("schema_version: 2\nlike: 2x8xH100\n", ":1:17: "),
        ("schema_version: 1\nlike: mine.yaml\n", ":2:7: .*like itself"),
        ("schema_version: 1\nlike: 2x8xH100\nnodes: 99999999999\n", ":3:8: .*to 1000"),
        ("schema_version: 1\nlike: 2x17xH100\n", ":2:7: .*to 16"),
        ("schema_version: 1\nlike: 2x8xH100\nsku: cpu-rehearsal\n", ":3:6: .*GPU with limits"),
        ("schema_version: 1\nlike: 2x8xH100\nspread: 60 %\n", ":3:9: .*below 50 %"),
        ("schema_version: 1\nlike: 2x8xH100\ngpu: {capability: nine}\n", ":3:6: .*9.x"),
        ("schema_version: 1\nlike: 2x8xH100\nnode: {link_layer: Myrinet}\n", ":3:7: .*Ethernet"),
        ("schema_version: 1\nlike: 2x8xH100\nnode: {numa_nodes: 300}\n", ":3:7: .*192"),
        ("schema_version: 1\nlike: 2x8xH100\nnode: {ports: 65}\n", ":3:7: .*to 64"),
        ("schema_version: 1\nlike: 2x8xH100\nnccl: {transport: IB}\n", ":3:7: .*NET/"),
        ("schema_version: 1\nlike: 2x8xH100\nhost_names: '../{}'\n", ":3:13: .*of their own"),
        ("schema_version: 1\nlike: 2x8xH100\nnode: {ports: 0}\nfaults: [nic-down:gpu-00]\n", ":4:10: .*no ports"),
        ("schema_version: 1\nlike: 2x8xH100\nnode: {ports: 0}\nfaults: [dead-rail:gpu-00/mlx5_0]\n", "has none"),
        ("", ":1:1: "),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path, monkeypatch, text, says):
    monkeypatch.chdir(tmp_path)
    path = Path("mine.yaml")
    path.write_text(text)
    with pytest.raises(OptionError, match=f"mine.yaml{says}" if says.startswith(":") else says):
        cluster.load(str(path))
