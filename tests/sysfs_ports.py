"""A sysfs with InfiniBand ports for tests, written as the kernel writes it."""

import os

COUNTERS = {
    "link_downed": 0,
    "link_error_recovery": 0,
    "symbol_error": 0,
    "port_rcv_errors": 0,
    "port_xmit_data": 1000,
    "port_rcv_data": 2000,
    "port_xmit_wait": 7,
}


def write(path, text):
    """Write an attribute; None removes it."""
    if text is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def add_port(
    sysfs,
    device="mlx5_0",
    number=1,
    *,
    pci="0000:18:00.0",
    state="4: ACTIVE",
    phys_state="5: LinkUp",
    rate="400 Gb/sec (4X NDR)",
    link_layer="InfiniBand",
    firmware="28.39.2048",
    kind="MT4129",
    board="MT_0000000838",
    numa_node=0,
    lid="0x1f",
    sm_lid="0x1",
    gids=None,
    interface="",
    counters=None,
    hw_counters=None,
):
    """Add a port, and its device with it. ``gids``: index -> (address, type). Returns the port's folder."""
    function = sysfs / "devices" / "pci0000:16" / pci
    (function / "infiniband" / device).mkdir(parents=True, exist_ok=True)
    write(function / "numa_node", numa_node)
    folder = sysfs / "class" / "infiniband" / device
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "device").exists():
        os.symlink(function, folder / "device")
    for name, text in {"fw_ver": firmware, "board_id": board, "hca_type": kind}.items():
        write(folder / name, text)
    write(folder / "node_guid", "a088:c203:00ab:1234")
    port = folder / "ports" / str(number)
    told = {"state": state, "phys_state": phys_state, "rate": rate, "link_layer": link_layer}
    for name, text in {**told, "lid": lid, "sm_lid": sm_lid}.items():
        write(port / name, text)
    for name, value in {**COUNTERS, **(counters or {})}.items():
        write(port / "counters" / name, value)
    for name, value in {"out_of_sequence": 0, "lifespan": 10, **(hw_counters or {})}.items():
        write(port / "hw_counters" / name, value)
    if gids is None:
        gids = {0: ("fe80:0000:0000:0000:a088:c203:00ab:1234", "IB/RoCE v1")}
    for index, (address, kind) in gids.items():
        write(port / "gids" / str(index), address)
        write(port / "gid_attrs" / "types" / str(index), kind)
        if interface:
            write(port / "gid_attrs" / "ndevs" / str(index), interface)
    if interface:
        write(port / "gid_attrs" / "ndevs" / "0", interface)
        write(function / "net" / interface / "carrier_down_count", 1)
    return port


ROCE_GIDS = {
    0: ("fe80:0000:0000:0000:a288:c2ff:feab:1234", "IB/RoCE v1"),
    1: ("fe80:0000:0000:0000:a288:c2ff:feab:1234", "RoCE v2"),
    2: ("0000:0000:0000:0000:0000:ffff:0a00:0004", "IB/RoCE v1"),
    3: ("0000:0000:0000:0000:0000:ffff:0a00:0004", "RoCE v2"),
    4: ("0000:0000:0000:0000:0000:0000:0000:0000", ""),
}
"""As mlx5 has them on an interface with one IPv4 address."""


def add_roce(sysfs, device="mlx5_0", **changes):
    """Add a RoCE port with an IPv4 address."""
    settings = {"link_layer": "Ethernet", "lid": "0x0", "sm_lid": "0x0", "gids": ROCE_GIDS, "interface": "eth2"}
    return add_port(sysfs, device, **{**settings, **changes})
