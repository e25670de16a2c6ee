import contextlib
import os
import stat
import tempfile
from pathlib import Path

import pytest
from complaints import in_order

from pytest_gpucluster.device.environment import SUBSYSTEMS, prepare
from pytest_gpucluster.node.fabric import nccl_log
from pytest_gpucluster.node.fabric.nccl_log import NcclLog

P2P = "node-a:7:8 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
IB = "node-a:7:8 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA\n"
SHM = "node-a:7:8 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct\n"
WORLD, NODE = tuple(range(16)), tuple(range(8))


@pytest.fixture
def log(tmp_path):
    return NcclLog(tmp_path / "7.log")


def write(log, text):
    with log.path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_nccl_logs_to_a_private_file_for_each_process(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {"PATH": "/bin"}
    prepare(environment)
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["NCCL_DEBUG_SUBSYS"] == SUBSYSTEMS
    assert list(tmp_path.iterdir()) == [], "nothing is made before NCCL is used"
    log = NcclLog.of(environment, pid=4711)
    log.open()
    assert stat.S_IMODE(log.path.parent.stat().st_mode) == 0o700
    assert log.path.name == "4711.log"
    sibling = NcclLog.of(environment, pid=4712)
    sibling.open()
    for one in (log, sibling):
        write(one, P2P)
    log.remove()
    assert sibling.path.exists()
    sibling.remove()
    sibling.remove()
    assert list(tmp_path.iterdir()) == []


def test_two_runs_have_different_folders_and_what_an_operator_has_set_stays():
    one, other = {}, {}
    prepare(one)
    prepare(other)
    assert one["NCCL_DEBUG_FILE"] != other["NCCL_DEBUG_FILE"]
    before = dict(one)
    prepare(one)
    assert one == before
    for theirs in (
        {"NCCL_DEBUG": "WARN"},
        {"NCCL_DEBUG_FILE": "/scratch/%h.%p"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL"},
    ):
        environment = dict(theirs)
        prepare(environment)
        assert {name: environment[name] for name in environment if name.startswith("NCCL_DEBUG")} == theirs
    environment = {"NCCL_DEBUG_SUBSYS": "INIT"}
    prepare(environment)
    assert (environment["NCCL_DEBUG_SUBSYS"], environment["NCCL_DEBUG"]) == ("INIT", "INFO"), "the rest is added"


def test_a_folder_of_another_user_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {}
    prepare(environment)
    log = NcclLog.of(environment, pid=1)
    (tmp_path / "elsewhere").mkdir()
    log.path.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="another user"):
        log.open()


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/x/%p"}, "NCCL_DEBUG=WARN is set in the environment"),
        ({"NCCL_DEBUG_FILE": "/x/%p"}, "NCCL_DEBUG_FILE without NCCL_DEBUG is set in the environment"),
        ({"NCCL_DEBUG": "info"}, "without NCCL_DEBUG_FILE, so NCCL logs to the terminal"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/x/log.%h"}, "has no %p, so that all ranks of a node write"),
    ],
    ids=["too little", "no level", "terminal", "one file for all"],
)
def test_an_operators_setting_that_leaves_no_log_is_named(environment, why):
    log = NcclLog.of(environment, pid=1)
    assert log.path is None
    assert why in log.choice(WORLD).unknown
    assert log.choice(WORLD).transports == ()
    log.open()
    log.keep(Path("/nonexistent/never-written"))
    log.remove()


def test_an_operators_own_file_is_read_and_left_where_it_is(tmp_path):
    environment = {"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_FILE": f"{tmp_path}/100%%/%h/nccl.%p.txt"}
    log = NcclLog.of(environment, pid=42, hostname="node-a.example.org")
    assert log.path == tmp_path / "100%/node-a/nccl.42.txt"
    log.open()
    assert list(tmp_path.iterdir()) == [], "the operator's folder is the operator's to make"
    log.path.parent.mkdir(parents=True)
    write(log, P2P)
    log.remove()
    assert log.path.exists()


def test_what_is_written_while_a_group_is_used_is_that_groups(log):
    with log.reading(WORLD):
        write(log, IB)
    with log.reading(NODE):
        write(log, P2P)
    with log.reading(WORLD):
        write(log, SHM)
    assert log.choice(NODE).transports == ("P2P",)
    assert log.choice(WORLD).transports == ("SHM", "NET/IB")
    assert log.choice((0,)).unknown != ""


def test_what_is_written_outside_belongs_to_the_group_of_all_ranks(log):
    write(log, IB)
    with log.reading(NODE):
        write(log, P2P)
    write(log, SHM)
    with log.reading(NODE):
        pass
    assert log.choice(WORLD, rest=True).transports == ("SHM", "NET/IB")
    assert log.choice(NODE).transports == ("P2P",)


def test_groups_that_are_gone_say_nothing_about_their_successors(log):
    write(log, IB)
    with log.reading(NODE):
        write(log, IB)
    log.begin_again()
    with log.reading(NODE):
        write(log, P2P)
    assert log.choice(NODE).transports == ("P2P",)
    assert log.choice(WORLD, rest=True).transports == ()


def test_half_a_line_bytes_that_are_no_text_and_a_failure_do_no_harm(log):
    assert in_order(log.choice(WORLD, rest=True).unknown, f"NCCL {log.path}")
    with log.reading(NODE):
        log.path.write_bytes(b"\xff\xfe\0" + (P2P + IB[:30]).encode())
    write(log, IB[30:])
    assert log.choice(NODE).transports == ("P2P",)
    with contextlib.suppress(RuntimeError), log.reading((0,)):
        write(log, SHM)
        raise RuntimeError
    assert log.choice((0,)).transports == ("SHM",)


def test_the_kept_copy_has_each_line_once_and_a_bounded_size(log, tmp_path):
    chosen = "node-a:7:{} [0] NCCL INFO AllReduce: 8 Bytes -> Algo TREE proto LL channel{{Lo..Hi}}={{0..0}}\n"
    write(log, P2P + "".join(chosen.format(thread) for thread in range(1000)) + SHM)
    log.keep(tmp_path / "kept.log")
    kept = (tmp_path / "kept.log").read_text().splitlines(keepends=True)
    assert kept[:3] == [P2P, chosen.format(0), SHM]
    [left_out] = kept[3:]
    assert in_order(left_out, f"(999 lines {nccl_log.MAX_KEPT_BYTES} bytes)")
    write(log, "".join(f"line {number}\n" for number in range(10_000)))
    log.keep(tmp_path / "short.log", max_bytes=1000)
    assert os.path.getsize(tmp_path / "short.log") < 1100


def test_the_reason_against_a_network_is_found_for_every_group(log):
    with log.reading(WORLD):
        write(log, "node-a:1:2 [0] NCCL INFO NET/IB : No device found.\n" * 2)
    with log.reading(NODE):
        write(log, P2P)
    [no_device] = [reason.text for reason in log.choice(NODE).reasons]
    assert "InfiniBand device" in no_device
    write(log, "node-a:1:2 [0] NCCL INFO NET/IB : No device found.\n")
    write(log, "node-a:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>\n")
    log.begin_again()
    assert [reason.text for reason in log.choice(WORLD).reasons] == [no_device, "sockets go over eth0"]


def test_what_this_suite_has_set_is_known_from_what_an_operator_has_set():
    environment = {"NCCL_IB_HCA": "mlx5"}
    prepare(environment)
    assert nccl_log.own_settings(environment) == {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"}
    environment["NCCL_DEBUG_SUBSYS"] = "ALL"
    assert nccl_log.own_settings(environment) == {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}
    theirs = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/scratch/%p.log", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS}
    assert nccl_log.own_settings(theirs) == frozenset()
    assert nccl_log.own_settings({}) == frozenset()
