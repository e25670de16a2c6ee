"""Parts that were swapped, moved, replaced, added or removed are reported as such, and so is changed firmware."""

import re

from each import of_each
from made_records import line_of, record

from pytest_gpucluster.analysis.certificate_diff import differences

IDENTITY = ("uuid", "serial")


def gpus(found):
    return [rank["gpu"] for rank in line_of(found, "cluster")["ranks"]]


def adapters(found, node):
    telemetry = line_of(found, "test")["measurements"][-1]["telemetry"]
    return telemetry[str(8 * node)]["adapters"]


def put(found, places):
    """Put the GPU of one rank (value) into the slot of another (key)."""
    known = gpus(found)
    cards = {slot: {key: known[card][key] for key in IDENTITY} for slot, card in places.items()}
    for slot, card in cards.items():
        known[slot].update(card)


def silent(found):
    line_of(found, "test")["measurements"].pop()


def nameless(found):
    gpus(found)[4]["uuid"] = None


def rename(found):
    for rank in line_of(found, "cluster")["ranks"][8:]:
        rank["host"] = "gpu-77"


def new_node(found):
    rename(found)
    for gpu in gpus(found)[8:]:
        gpu["uuid"] += "-new"


def lose_the_last(found):
    line_of(found, "cluster")["ranks"].pop()


def swap_adapters(found):
    first, second = adapters(found, 0)
    first["guid"], second["guid"] = second["guid"], first["guid"]


def changes(tmp_path, change, before=lambda _: None):
    old, new = record(tmp_path, "old", before), record(tmp_path, "new", change)
    return [(each.kind, each.where, each.what) for each in differences(old, new)]


@of_each(
    "case",
    [
        (lambda found: found[0].update(run_id="later"), []),
        (
            lambda found: put(found, {3: 9, 9: 3}),
            [
                ("moved", "gpu-01 GPU 3 (00000000:4F:00.0) -> gpu-02 GPU 1 (00000000:2B:00.0)"),
                ("moved", "gpu-02 GPU 1 (00000000:2B:00.0) -> gpu-01 GPU 3 (00000000:4F:00.0)"),
            ],
        ),
        (
            lambda found: gpus(found)[5].update(uuid="GPU-new", serial="1"),
            [("replaced", "gpu-01 GPU 5 (00000000:73:00.0)")],
        ),
        (lose_the_last, [("removed", "gpu-02 GPU 7 (00000000:97:00.0)")]),
        (lambda found: adapters(found, 1)[0].update(guid="ff:ff"), [("replaced", "gpu-02 mlx5_0 (0:10)")]),
        (
            swap_adapters,
            [("moved", f"gpu-01 mlx5_{a} (0:1{a}) -> gpu-01 mlx5_{b} (0:1{b})") for a, b in ((0, 1), (1, 0))],
        ),
        (
            lambda found: gpus(found)[4].update(uuid=gpus(found)[6]["uuid"]),
            [
                ("twice", "gpu-01 GPU 4 (00000000:61:00.0) and gpu-01 GPU 6 (00000000:85:00.0)"),
                ("removed", "gpu-01 GPU 4 (00000000:61:00.0)"),
            ],
        ),
    ],
)
def test_each_change_of_parts_is_named_by_node_and_slot(tmp_path, case):
    change, expected = case
    assert [(kind, where) for kind, where, _ in changes(tmp_path, change)] == expected


@of_each(
    "case",
    [
        (lose_the_last, ["removed"], ["added"]),
        (silent, ["removed"] * 4, ["added"] * 4),  # adapters of which a record says nothing are not the same
        (nameless, ["unknown"], ["unknown"]),
    ],
)
def test_what_one_certificate_lacks_is_reported_of_either_one(tmp_path, case):
    change, lost, found = case
    assert [kind for kind, _, _ in changes(tmp_path, change)] == lost
    assert [kind for kind, _, _ in changes(tmp_path, lambda _: None, before=change)] == found
    # A part whose identity is unknown is never the same.
    assert [kind for kind, _, _ in changes(tmp_path, nameless, before=nameless)] == ["unknown"]


def test_a_part_that_takes_the_place_of_one_that_is_gone_is_moved_and_the_other_removed(tmp_path):
    def change(found):
        put(found, {9: 3})
        del line_of(found, "cluster")["ranks"][3]

    assert sorted(kind for kind, _, _ in changes(tmp_path, change)) == ["moved", "removed"]


def test_a_node_of_another_name_is_another_node(tmp_path):
    kinds = [kind for kind, _, _ in changes(tmp_path, rename)]
    assert kinds == ["node removed", "node added", *["moved"] * 10]
    found = changes(tmp_path, new_node)
    kinds = [kind for kind, _, _ in found]  # the adapters are the same, in a node of another name
    assert ("node removed", "gpu-02", "8 GPUs") in found
    assert ("node added", "gpu-77", "8 GPUs") in found
    assert (kinds.count("added"), kinds.count("moved")) == (8, 2)


def test_firmware_and_versions_are_reported_once_for_all_that_share_them(tmp_path):
    def change(found):
        for rank in line_of(found, "cluster")["ranks"][8:]:
            rank["versions"]["driver"] = "590.1"
        for gpu in gpus(found):
            gpu["vbios"] = "96.01"
        gpus(found)[0]["inforom"] = None
        adapters(found, 0)[1]["firmware"] = "28.40"

    found = [(kind, where, re.sub(" of the [^:]*:", ":", what)) for kind, where, what in changes(tmp_path, change)]
    assert found == [
        (
            "changed",
            ", ".join(f"gpu-01 GPU {n} (00000000:{0x19 + 0x12 * n:02X}:00.0)" for n in range(4)) + " and 12 more",
            "VBIOS: 96.00.89.00.01 -> 96.01",
        ),
        ("changed", "gpu-01 GPU 0 (00000000:19:00.0)", "InfoROM: G520.0200 -> unknown"),
        ("changed", "gpu-01 mlx5_1 (0:11)", "firmware: 28.39 -> 28.40"),
        ("changed", "gpu-02", "driver: 580.95.05 -> 590.1"),
    ]


def test_how_the_runs_were_judged_is_no_change_of_the_cluster(tmp_path):
    def change(found):
        line_of(found, "limits")["files"][0]["sha256"] = "cd" * 32
        found[0].update(plugin_version="9.9", selection=True)

    old, new = record(tmp_path, "old"), record(tmp_path, "new", change)
    assert differences(old, new) == ()


def _sliced(found):
    """The first two ranks have slices of one GPU, which share its address."""
    gpus(found)[1].update(pci_bus_id=gpus(found)[0]["pci_bus_id"], index=0)


def _all_called_alike(found):
    for rank in line_of(found, "cluster")["ranks"]:
        rank["host"] = "localhost"


@of_each("change", [_sliced, _all_called_alike])
def test_slots_and_hosts_of_one_name_are_kept_apart(tmp_path, change):
    old = record(tmp_path, "old", change)
    assert differences(old, old) == ()

    def replaced(found):
        change(found)
        gpus(found)[0]["uuid"] = "GPU-new"

    [found] = differences(old, record(tmp_path, "new", replaced))
    assert (found.kind, "GPU-new" in found.what) == ("replaced", True)
