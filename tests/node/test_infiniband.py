from complaints import in_order
from sysfs_ports import add_port, add_roce, write

from pytest_gpucluster.node import infiniband
from pytest_gpucluster.node.infiniband import Gid, read


def test_a_port_is_read_as_the_kernel_shows_it(tmp_path):
    add_port(tmp_path, "mlx5_3", counters={"link_downed": 2, "symbol_error": 5}, hw_counters={"out_of_sequence": 9})
    found = read(tmp_path)
    [device] = found.devices
    assert (device.name, device.kind, device.firmware) == ("mlx5_3", "MT4129", "28.39.2048")
    assert (device.pci, device.numa_node, device.guid) == ("0000:18:00.0", 0, "a088:c203:00ab:1234")
    [port] = found.ports
    assert (port.name, port.state, port.phys_state, port.rate_gbps) == ("mlx5_3/1", "ACTIVE", "LinkUp", 400.0)
    assert (port.link_layer, port.lid, port.sm_lid, port.is_active) == ("InfiniBand", 31, 1, True)
    assert port.gids == (Gid(index=0, address="fe80:0000:0000:0000:a088:c203:00ab:1234", kind="IB/RoCE v1"),)
    assert (port.counters["link_downed"], port.counters["symbol_error"]) == (2, 5)
    assert port.counters["out_of_sequence"] == 9
    assert "lifespan" not in port.counters, "a setting, not a count"
    assert str(port) == "mlx5_3/1 InfiniBand ACTIVE (LinkUp), 400 Gb/sec (4X NDR)"


def test_data_are_counted_in_words_of_four_bytes_and_reported_in_bytes(tmp_path):
    add_port(tmp_path, counters={"port_xmit_data": 25_000_000_000, "port_rcv_data": 3})
    [port] = read(tmp_path).ports
    assert (port.counters["port_xmit_bytes"], port.counters["port_rcv_bytes"]) == (100_000_000_000, 12)
    assert "port_xmit_data" not in port.counters
    [port] = read(tmp_path, gids=False, only_bytes=True).ports
    assert port.counters == {"port_xmit_bytes": 100_000_000_000, "port_rcv_bytes": 12}
    assert (port.gids, port.is_active) == ((), True)


def test_odd_entries_are_read_for_what_they_are(tmp_path):
    gids = {0: ("fe80:0000:0000:0000:a088:c203:00ab:1234", ""), 1: ("fe80::", ""), 2: ("gone", "")}
    add_port(tmp_path, gids=gids, numa_node=-1, rate="2.5 Gb/sec (1X SDR)")
    [device] = read(tmp_path).devices
    assert [gid.index for gid in device.ports[0].gids] == [0], "an empty entry is none"
    assert (device.numa_node, device.ports[0].rate_gbps) == (None, 2.5)


def test_a_roce_port_has_its_gids_and_the_carrier_of_its_own_interface(tmp_path):
    add_roce(tmp_path, interface="eth2")
    function = tmp_path / "devices" / "pci0000:16" / "0000:18:00.0" / "net"
    write(function / "eth2" / "carrier_down_count", 4)
    write(function / "eth0r1" / "carrier_down_count", 99)  # a representor of a virtual function
    [port] = read(tmp_path).ports
    assert [gid.index for gid in port.gids] == [0, 1, 2, 3], "an empty entry is none"
    assert [gid.index for gid in port.gids if gid.is_ipv4 and gid.kind == infiniband.ROCE_V2] == [3]
    assert {gid.interface for gid in port.gids} == {"eth2"}
    assert port.counters["carrier_down_count"] == 4
    assert read(tmp_path, gids=False).ports[0].gids == ()
    assert read(tmp_path, gids=False).ports[0].counters == port.counters


def test_only_an_active_port_is_active(tmp_path):
    for state in ("1: DOWN", "2: INIT", "5: ACTIVE_DEFER"):
        add_port(tmp_path / state, state=state)
        [port] = read(tmp_path / state).ports
        assert not port.is_active
        assert state[3:] in str(port)


def test_what_a_driver_lacks_or_refuses_is_unknown_and_nothing_else_suffers(tmp_path):
    port = add_port(tmp_path, counters={"symbol_error": "N/A (no PMA)", "link_error_recovery": None})
    for name in ("state", "phys_state", "rate", "link_layer", "lid"):
        write(port / name, None)
    (tmp_path / "class" / "infiniband" / "mlx5_0" / "device").unlink()
    [device] = read(tmp_path).devices
    [found] = device.ports
    assert (found.state, found.rate_gbps, found.link_layer, found.lid, found.is_active) == ("", None, "", 0, False)
    assert not {"symbol_error", "link_error_recovery"} & set(found.counters)
    assert found.counters["link_downed"] == 0
    assert (device.pci, device.numa_node) == (None, None)
    assert in_order(str(found), "mlx5_0/1")


def test_a_node_without_infiniband_says_so(tmp_path):
    found = read(tmp_path)
    assert (found.devices, found.ports) == ((), ())
    assert in_order(found.why_not, f"{tmp_path} /class/infiniband No")
    (tmp_path / "class" / "infiniband").mkdir(parents=True)
    assert read(tmp_path).why_not == f"{tmp_path}/class/infiniband is empty"
    (tmp_path / "class" / "infiniband" / "mlx5_0").mkdir()
    found = read(tmp_path)
    assert ([device.name for device in found.devices], found.ports) == (["mlx5_0"], ()), "a device without ports"
