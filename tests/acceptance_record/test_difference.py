"""Parts that were swapped, moved, replaced, added or removed are told as what they are, and so is firmware."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from made_records import Lines, line_of, record

from pytest_gpucluster.acceptance_record.difference import differences, judged_otherwise
from pytest_gpucluster.acceptance_record.document import digest, read
from pytest_gpucluster.errors import RecordError

IDENTITY = ("uuid", "serial")


def gpus(found: Lines) -> list[dict]:
    return [rank["gpu"] for rank in line_of(found, "cluster")["ranks"]]


def adapters(found: Lines, node: int) -> list[dict]:
    telemetry = line_of(found, "test")["measurements"][-1]["telemetry"]
    return telemetry[str(8 * node)]["adapters"]


def put(found: Lines, places: dict[int, int]) -> None:
    """Put the GPU of one rank (value) into the slot of another (key)."""
    known = gpus(found)
    cards = {slot: {key: known[card][key] for key in IDENTITY} for slot, card in places.items()}
    for slot, card in cards.items():
        known[slot].update(card)


def swap(found: Lines) -> None:
    put(found, {3: 9, 9: 3})


def turn(found: Lines) -> None:
    put(found, {0: 1, 1: 2, 2: 0})


def replace_one(found: Lines) -> None:
    gpus(found)[5].update(uuid="GPU-new", serial="1")


def without(found: Lines, rank: int) -> None:
    ranks = line_of(found, "cluster")["ranks"]
    del ranks[rank]


def rename(found: Lines) -> None:
    for rank in line_of(found, "cluster")["ranks"][8:]:
        rank["host"] = "gpu-77"


def new_driver(found: Lines) -> None:
    for rank in line_of(found, "cluster")["ranks"][8:]:
        rank["versions"]["driver"] = "590.1"


def new_node(found: Lines) -> None:
    for rank in line_of(found, "cluster")["ranks"][8:]:
        rank["host"] = "gpu-77"
        rank["gpu"]["uuid"] += "-new"


def told(tmp_path, change: Callable[[Lines], object], before: Callable[[Lines], object] = lambda _: None):
    old, new = record(tmp_path, "old", before), record(tmp_path, "new", change)
    return [(each.kind, each.where, each.what) for each in differences(old, new)]


def test_two_records_of_the_same_parts_have_no_difference(tmp_path):
    assert told(tmp_path, lambda found: found[0].update(run_id="later")) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (swap, [("swapped", "gpu-01 GPU 3 (00000000:4F:00.0) <-> gpu-02 GPU 1 (00000000:2B:00.0)")]),
        (
            turn,
            [
                ("moved", "gpu-01 GPU 0 (00000000:19:00.0) -> gpu-01 GPU 2 (00000000:3D:00.0)"),
                ("moved", "gpu-01 GPU 1 (00000000:2B:00.0) -> gpu-01 GPU 0 (00000000:19:00.0)"),
                ("moved", "gpu-01 GPU 2 (00000000:3D:00.0) -> gpu-01 GPU 1 (00000000:2B:00.0)"),
            ],
        ),
        (replace_one, [("replaced", "gpu-01 GPU 5 (00000000:73:00.0)")]),
        (lambda found: without(found, 15), [("removed", "gpu-02 GPU 7 (00000000:97:00.0)")]),
        (rename, [("node renamed", "gpu-02 -> gpu-77")]),
        (lambda found: adapters(found, 1)[0].update(guid="ff:ff"), [("replaced", "gpu-02 mlx5_0 (0:10)")]),
        (
            lambda found: [
                one.update(guid=guid)
                for one, guid in zip(adapters(found, 0), [one["guid"] for one in adapters(found, 0)][::-1], strict=True)
            ],
            [("swapped", "gpu-01 mlx5_0 (0:10) <-> gpu-01 mlx5_1 (0:11)")],
        ),
    ],
    ids=["swapped", "turned", "replaced", "removed", "renamed", "adapter", "adapters swapped"],
)
def test_each_change_of_parts_is_named_by_node_and_slot(tmp_path, change, expected):
    assert [(kind, where) for kind, where, _ in told(tmp_path, change)] == expected


def test_a_swap_names_both_parts_with_their_serial_numbers(tmp_path):
    nodes = record(tmp_path, "r").record["nodes"]
    [(_, _, what)] = told(tmp_path, swap)
    first, second = nodes[0]["gpus"][3], nodes[1]["gpus"][1]
    assert what == f"{first['uuid']} (serial {first['serial']}) and {second['uuid']} (serial {second['serial']})"


def test_what_was_removed_is_added_the_other_way_round(tmp_path):
    [(kind, where, _)] = told(tmp_path, lambda _: None, before=lambda found: without(found, 15))
    assert (kind, where) == ("added", "gpu-02 GPU 7 (00000000:97:00.0)")


def test_a_part_that_takes_the_place_of_one_that_is_gone_is_moved_and_the_other_removed(tmp_path):
    def change(found: Lines) -> None:
        put(found, {9: 3})
        without(found, 3)

    assert sorted(kind for kind, _, _ in told(tmp_path, change)) == ["moved", "removed"]


def test_a_node_with_other_parts_is_another_node(tmp_path):
    found = told(tmp_path, new_node)
    kinds = [kind for kind, _, _ in found]
    assert ("node removed", "gpu-02", "8 GPUs") in found
    assert ("node added", "gpu-77", "8 GPUs") in found
    assert kinds.count("added") == 8 + 2 - 2  # the adapters are the same, in a node of another name
    assert kinds.count("moved") == 2


def test_firmware_and_versions_are_told_once_for_all_that_share_them(tmp_path):
    def change(found: Lines) -> None:
        new_driver(found)
        for gpu in gpus(found):
            gpu["vbios"] = "96.01"
        gpus(found)[0]["inforom"] = None
        adapters(found, 0)[1]["firmware"] = "28.40"

    assert told(tmp_path, change) == [
        (
            "changed",
            ", ".join(f"gpu-01 GPU {n} (00000000:{0x19 + 0x12 * n:02X}:00.0)" for n in range(4)) + " and 12 more",
            "VBIOS of the GPU: 96.00.89.00.01 -> 96.01",
        ),
        ("changed", "gpu-01 GPU 0 (00000000:19:00.0)", "InfoROM of the GPU: G520.0200 -> not known"),
        ("changed", "gpu-01 mlx5_1 (0:11)", "firmware of the adapter: 28.39 -> 28.40"),
        ("changed", "gpu-02", "driver: 580.95.05 -> 590.1"),
    ]


def test_a_part_whose_identity_is_not_known_is_never_the_same(tmp_path):
    def nameless(found: Lines) -> None:
        gpus(found)[4]["uuid"] = None

    assert [kind for kind, _, _ in told(tmp_path, nameless)] == ["unknown"]
    assert [kind for kind, _, _ in told(tmp_path, lambda _: None, before=nameless)] == ["unknown"]
    assert [kind for kind, _, _ in told(tmp_path, nameless, before=nameless)] == ["unknown"]


def test_adapters_that_one_record_does_not_tell_are_missing_and_not_the_same(tmp_path):
    def silent(found: Lines) -> None:
        line_of(found, "test")["measurements"].pop()

    assert [kind for kind, _, _ in told(tmp_path, silent)] == ["removed"] * 4
    assert [kind for kind, _, _ in told(tmp_path, lambda _: None, before=silent)] == ["added"] * 4


def test_a_part_that_stands_twice_in_one_record_is_told(tmp_path):
    def twice(found: Lines) -> None:
        gpus(found)[4]["uuid"] = gpus(found)[6]["uuid"]

    [(kind, where, _), (other, there, _)] = told(tmp_path, twice)
    assert (kind, where) == ("twice", "gpu-01 GPU 4 (00000000:61:00.0) and gpu-01 GPU 6 (00000000:85:00.0)")
    assert (other, there) == ("removed", "gpu-01 GPU 4 (00000000:61:00.0)")


def test_how_the_runs_were_judged_is_no_change_of_the_cluster(tmp_path):
    def change(found: Lines) -> None:
        line_of(found, "limits")["files"][0]["sha256"] = "cd" * 32
        found[0].update(plugin_version="9.9", selection=True)

    old, new = record(tmp_path, "old"), record(tmp_path, "new", change)
    assert differences(old, new) == ()
    assert judged_otherwise(old, old) == ()
    assert judged_otherwise(old, new) == (
        "the files of limits differ",
        "pytest-gpucluster 0.1.0 -> 9.9",
        "accepted -> NOT accepted",
    )


@pytest.mark.parametrize(
    "nodes",
    [[1], [{}], [{"host": "a", "versions": {}}], [{"host": "a", "versions": {}, "gpus": 1}]],
    ids=str,
)
def test_nodes_of_another_form_are_refused(tmp_path, nodes):
    path = record(tmp_path, "old").path
    changed = json.loads(path.read_text())
    changed["record"]["nodes"] = nodes
    changed["sha256"] = digest(changed["record"])
    path.write_text(json.dumps(changed))
    with pytest.raises(RecordError, match="must be there"):
        differences(read(path), read(path))


def _sliced(found: Lines) -> None:
    """The first two ranks have slices of one GPU, which share its address."""
    ranks = line_of(found, "cluster")["ranks"]
    ranks[1]["gpu"] |= {"pci_bus_id": ranks[0]["gpu"]["pci_bus_id"], "index": ranks[0]["gpu"]["index"]}


def _all_called_alike(found: Lines) -> None:
    for rank in line_of(found, "cluster")["ranks"]:
        rank["host"] = "localhost"


@pytest.mark.parametrize("change", [_sliced, _all_called_alike])
def test_slots_and_hosts_of_one_name_are_kept_apart(tmp_path, change):
    old = record(tmp_path, "old", change)
    assert differences(old, old) == ()

    def replaced(found: Lines) -> None:
        change(found)
        line_of(found, "cluster")["ranks"][0]["gpu"]["uuid"] = "GPU-new"

    [found] = differences(old, record(tmp_path, "new", replaced))
    assert (found.kind, "GPU-new" in found.what) == ("replaced", True)
