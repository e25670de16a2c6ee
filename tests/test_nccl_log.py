from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from pytest_gpucluster import activation, nccl_log
from pytest_gpucluster.nccl_log import SUBSYSTEMS, NcclLog, prepare

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


def test_a_session_prepares_the_log_before_anybody_can_use_nccl(monkeypatch):
    environment = {}
    monkeypatch.setattr(os, "environ", environment)
    activation.prepare_environment()
    assert environment["NCCL_DEBUG"] == "INFO"
    assert NcclLog.of(environment, pid=1).path is not None


def test_two_runs_have_different_folders_and_a_second_call_changes_nothing():
    one, other = {}, {}
    prepare(one)
    prepare(other)
    assert one["NCCL_DEBUG_FILE"] != other["NCCL_DEBUG_FILE"]
    before = dict(one)
    prepare(one)
    assert one == before


def test_a_folder_that_somebody_else_has_put_there_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {}
    prepare(environment)
    log = NcclLog.of(environment, pid=1)
    (tmp_path / "elsewhere").mkdir()
    log.path.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        log.open()


@pytest.mark.parametrize(
    "set_before",
    [{"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG_FILE": "/scratch/%h.%p"}, {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL"}],
    ids=["level", "file", "level and subsystems"],
)
def test_what_an_operator_has_set_stays(set_before):
    environment = dict(set_before)
    prepare(environment)
    assert environment == set_before


def test_subsystems_that_an_operator_has_set_stay_and_the_rest_is_added():
    environment = {"NCCL_DEBUG_SUBSYS": "INIT"}
    prepare(environment)
    assert environment["NCCL_DEBUG_SUBSYS"] == "INIT"
    assert environment["NCCL_DEBUG"] == "INFO"


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


def test_a_log_that_was_never_written_is_unknown(log):
    assert log.choice(WORLD, rest=True).unknown == f"NCCL has written no log to {log.path}"


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


def test_a_group_that_fails_while_it_is_read_keeps_what_was_written(log):
    def fail():
        with log.reading(NODE):
            write(log, P2P)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
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


def test_a_line_that_is_only_half_written_does_no_harm(log):
    with log.reading(NODE):
        write(log, P2P + IB[:30])
    write(log, IB[30:])
    assert log.choice(NODE).transports == ("P2P",)


def test_a_log_that_somebody_has_cut_short_is_read_to_its_end(log, tmp_path):
    with log.reading(NODE):
        write(log, P2P + IB)
        os.truncate(log.path, len(P2P))
        write(log, "")
    log._parts = [(NODE, 0, len(P2P + IB))]
    assert log.choice(NODE).transports == ("P2P",)
    log.keep(tmp_path / "kept.log")
    assert (tmp_path / "kept.log").read_text() == P2P


def test_bytes_that_are_no_text_do_no_harm(log):
    with log.reading(NODE):
        log.path.write_bytes(b"\xff\xfe\0" + P2P.encode())
    assert log.choice(NODE).transports == ("P2P",)


def test_the_kept_copy_has_each_line_once_and_a_bounded_size(log, tmp_path):
    chosen = "node-a:7:{} [0] NCCL INFO AllReduce: 8 Bytes -> Algo TREE proto LL channel{{Lo..Hi}}={{0..0}}\n"
    write(log, P2P + "".join(chosen.format(thread) for thread in range(1000)) + SHM)
    log.keep(tmp_path / "kept.log")
    kept = (tmp_path / "kept.log").read_text().splitlines(keepends=True)
    assert kept[:3] == [P2P, chosen.format(0), SHM]
    assert kept[3:] == [f"(999 lines left out here: repeated, or beyond {nccl_log.MOST_BYTES} bytes)\n"]
    write(log, "".join(f"line {number}\n" for number in range(10_000)))
    log.keep(tmp_path / "short.log", most_bytes=1000)
    assert os.path.getsize(tmp_path / "short.log") < 1100


def test_why_a_network_was_not_taken_is_told_for_every_group_wherever_it_stands(log):
    with log.reading(WORLD):
        write(log, "node-a:1:2 [0] NCCL INFO NET/IB : No device found.\n")
    with log.reading(NODE):
        write(log, P2P)
    assert [reason.text for reason in log.choice(NODE).reasons] == ["NCCL has found no InfiniBand device"]
    write(log, "node-a:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>\n")
    log.begin_again()
    assert [reason.text for reason in log.choice(WORLD).reasons] == [
        "NCCL has found no InfiniBand device",
        "sockets go over eth0",
    ]


def test_what_this_suite_has_set_is_known_from_what_an_operator_has_set():
    environment = {"NCCL_IB_HCA": "mlx5"}
    prepare(environment)
    assert nccl_log.own_settings(environment) == {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"}
    environment["NCCL_DEBUG_SUBSYS"] = "ALL"
    assert nccl_log.own_settings(environment) == {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}
    theirs = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/scratch/%p.log", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS}
    assert nccl_log.own_settings(theirs) == frozenset()
    assert nccl_log.own_settings({}) == frozenset()
