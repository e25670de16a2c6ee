import json
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from each import of_each

from pytest_gpucluster.agreement import hang_diagnosis
from pytest_gpucluster.agreement.hang_diagnosis import (
    Operation,
    Where,
    culprits,
    main_thread_stack,
    recorded_operations,
)

STACK = """\
  File "/suite/test_nccl.py", line 12, in test_it
    step(cluster)
  File "/suite/steps.py", line 40, in step
    time.sleep(100)"""


def op(sequence, name="all_reduce", *, pending=True, group="world"):
    return Operation(group=group, sequence=sequence, name=name, pending=pending)


def at(rank, *operations, stack=STACK):
    return rank, Where(stack=stack, operations=operations)


def slow(*wheres, missing, silent=None):
    return hang_diagnosis.too_slow(dict(wheres), silent or {}, missing=missing, deadline_seconds=60.0)


def busy(rank, *operations, waits=None, computes=True):
    return rank, Where(stack=STACK, operations=operations, computes=computes, waits_seconds=waits)


DONE, WAITS = op(4, pending=False), op(5)


@pytest.mark.parametrize(
    ("wheres", "missing"),
    [
        pytest.param([busy(0), busy(1)], [0, 1], id="all compute, without a collective"),
        pytest.param([busy(0, DONE), busy(1, DONE)], [0, 1], id="all compute between collectives"),
        pytest.param(
            [busy(0, DONE), busy(1, DONE, WAITS, waits=0.3, computes=False)], [0, 1], id="one waits since just now"
        ),
        pytest.param([busy(0, WAITS, waits=2.0), busy(1, WAITS, waits=2.0)], [0, 1], id="in a collective of 2 s"),
        pytest.param([busy(0), at(1)], [0], id="one has finished"),
    ],
)
def test_ranks_that_compute_and_whose_collectives_go_on_are_only_slow(wheres, missing):
    assert slow(*wheres, missing=missing)


@pytest.mark.parametrize(
    ("wheres", "missing", "silent"),
    [
        pytest.param([at(0), busy(1)], [0, 1], {}, id="one neither computes nor waits for a collective"),
        pytest.param([busy(0), busy(1, WAITS, waits=40.0)], [0, 1], {}, id="one waits for long, as for a busy loop"),
        pytest.param([busy(0, WAITS), busy(1)], [0, 1], {}, id="nothing tells how long it waits"),
        pytest.param(
            [busy(rank, WAITS, waits=0.3, computes=False) for rank in (0, 1)], [0, 1], {}, id="all wait, none computes"
        ),
        pytest.param([busy(0)], [0, 1], {1: "T: stopped"}, id="one does not answer"),
        pytest.param(
            [busy(0, WAITS, waits=0.3), busy(1, op(5, "broadcast"), waits=0.3)], [0, 1], {}, id="in two collectives"
        ),
        pytest.param([busy(0, WAITS, waits=0.3), at(1, DONE)], [0], {}, id="one has finished without the other"),
        pytest.param([busy(0)], [0, 1], {}, id="of one nothing is known"),
        pytest.param([busy(0)], [], {}, id="none is missing"),
    ],
)
def test_what_may_be_a_hang_is_not_slow(wheres, missing, silent):
    assert slow(*wheres, missing=missing, silent=silent) == ""


def blamed(*wheres, missing, silent=None):
    found = culprits(dict(wheres), silent or {}, missing=missing)
    return {rank: culprit.message for rank, culprit in found.items()}


def test_a_rank_that_hangs_outside_of_any_collective_is_blamed_with_its_place():
    waiting = [at(rank, op(4, pending=False), op(5)) for rank in (0, 2)]
    hanging = at(1, op(4, pending=False))
    assert blamed(*waiting, hanging, missing=[0, 1, 2]) == {1: "hangs at steps.py:40 in step"}
    assert blamed(at(0, stack="  (no Python frame)"), missing=[0])[0].startswith("hangs outside ")
    of_torch = '  File "/venv/lib/python3.11/site-packages/torch/x.py", line 9, in wait\n    lock()\n'
    stack = f'  File "/suite/test_it.py", line 7, in test_it\n    wait()\n{of_torch}'
    assert blamed(at(0, stack=stack), missing=[0]) == {0: "hangs at test_it.py:7 in test_it"}
    wheres = [at(rank, op(1, f"send {rank}->{(rank + 1) % 1024}")) for rank in range(1024)]
    assert len(blamed(*wheres, missing=list(range(1024)))[0]) < 200


def test_a_rank_that_does_not_answer_is_blamed_and_those_that_wait_for_it_are_not():
    found = blamed(at(0, op(5)), missing=[0, 1], silent={1: "T"})
    assert found == {1: "does not answer (T)"}
    assert blamed(at(0), missing=[0], silent={1: "gone"}) == {0: "hangs at steps.py:40 in step"}
    assert list(blamed(at(0), at(1), missing=[1])) == [1], "who has finished is not blamed"


@pytest.mark.parametrize(
    ("wheres", "missing", "expected"),
    [
        pytest.param(
            [at(0, op(5)), at(1, op(4, pending=False)), at(2, op(5))],
            [0, 2],
            {1: "finished without entering all_reduce #5 of group world, where ranks 0, 2 wait"},
            id="one has left before the others' collective",
        ),
        pytest.param(
            [at(0, op(5)), at(1, op(5, "barrier")), at(2, op(5))],
            [0, 1, 2],
            {1: "waits in barrier #5, while ranks 0, 2 wait in all_reduce #5 of group world"},
            id="one is in another collective",
        ),
        pytest.param(
            [at(0, op(5)), at(1, op(4))],
            [0, 1],
            {1: "waits in all_reduce #4, while rank 0 waits in all_reduce #5 of group world"},
            id="of two the one that is behind",
        ),
        pytest.param(
            [at(0, op(9, group="tp")), at(1, op(8, group="world")), at(2, op(8, group="world"))],
            [0, 1, 2],
            {0: "waits in all_reduce #9 of group tp, while ranks 1-2 wait in all_reduce #8 of group world"},
            id="most ranks decide, not the count of another group",
        ),
        pytest.param(
            [at(0, op(1)), at(1, op(1, "all_gather"))],
            [0, 1],
            {
                0: "waits in all_reduce #1, while rank 1 waits in all_gather #1 of group world",
                1: "waits in all_gather #1, while rank 0 waits in all_reduce #1 of group world",
            },
            id="of two in two collectives nothing tells who is right",
        ),
        pytest.param(
            [at(0, op(3, group="tp")), at(1, op(9, group="world"))],
            [0, 1],
            {
                0: "waits in all_reduce #3 of group tp, while rank 1 waits in all_reduce #9 of group world",
                1: "waits in all_reduce #9 of group world, while rank 0 waits in all_reduce #3 of group tp",
            },
            id="nor do the counts of two groups",
        ),
        pytest.param(
            [at(0, op(5)), at(1, op(5, "barrier")), at(2, op(4))],
            [0, 1, 2],
            {
                0: "waits in all_reduce #5, while rank 1 waits in barrier #5 of group world",
                1: "waits in barrier #5, while rank 0 waits in all_reduce #5 of group world",
                2: "waits in all_reduce #4, while rank 0 waits in all_reduce #5 of group world and rank 1 waits in"
                " barrier #5 of group world",
            },
            id="one that is behind two is told of both",
        ),
        pytest.param(
            [at(0, op(1, group="sub")), at(1, op(5)), at(2, op(4, pending=False))],
            [0, 1],
            {2: "finished without entering all_reduce #5 of group world, where rank 1 waits"},
            id="who waits in another group, for one that waits for the culprit, is not blamed",
        ),
        pytest.param(
            [
                at(0, op(4, pending=False, group="a"), op(2, pending=False, group="tp")),
                at(1, op(3, group="tp")),
                *(at(rank, op(5, group="a" if rank % 2 == 0 else "b")) for rank in range(2, 8)),
            ],
            [1, 2, 3, 4, 5, 6, 7],
            {
                0: "finished without entering all_reduce #3 of group tp, where rank 1 waits and all_reduce #5 of group"
                " a, where ranks 2, 4, 6 wait"
            },
            id="of a group that it is no member of nothing is told",
        ),
        pytest.param(
            [at(0, op(5, group="a")), at(1, op(5, "barrier", group="a")), at(2, op(5, group="a")), at(3, op(7))],
            [0, 1, 2, 3],
            {1: "waits in barrier #5, while ranks 0, 2 wait in all_reduce #5 of group a"},
            id="who differs in its own group comes before who waits in another",
        ),
        pytest.param([at(0, op(5)), at(1, op(5))], [0, 1], {}, id="all wait in the same: nobody is blamed"),
        pytest.param([at(0, op(5)), at(1, op(5, pending=False))], [0], {}, id="one has been through it already"),
    ],
)
def test_where_all_wait_in_collectives_the_odd_one_out_is_blamed(wheres, missing, expected):
    assert blamed(*wheres, missing=missing) == expected


def test_the_making_of_a_group_counts_as_a_collective_that_all_must_enter():
    found = blamed(at(0, hang_diagnosis.MAKING_GROUP), at(1), missing=[0])
    assert list(found) == [1]
    assert hang_diagnosis.MAKING_GROUP.name in found[1]
    assert found[1].endswith("where rank 0 waits")


def test_a_culprits_text_holds_its_last_collectives_and_its_stack():
    where = at(1, *(op(n, pending=n == 9) for n in range(1, 10)))
    found = culprits(dict([at(0, op(10)), where]), {}, missing=[0, 1])[1].text
    assert re.search("all_reduce #9 .*: entered, not finished\n", found)
    assert re.search("all_reduce #5 .*: finished\n", found)
    assert "#4" not in found
    assert found.endswith(f":\n{STACK}")
    assert at(1)[1].describe().startswith("no collective")


def test_the_main_threads_stack_is_seen_from_another_thread_and_begins_at_the_test():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(main_thread_stack()))
    thread.start()
    thread.join()
    assert "in test_the_main_threads_stack_is_seen_from_another_thread" in seen[0]
    stack = main_thread_stack()
    assert "/_pytest/" not in stack
    assert "/pluggy/" not in stack
    first = stack.splitlines()[0]
    assert f'File "{__file__}"' in first
    assert "in test_the_main_threads_stack_is_seen" in first


def entry(sequence, created, **more):
    return {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": "gloo:all_reduce",
        "retired": False,
        "state": "scheduled",
        "time_created_ns": created,
        **more,
    }


@pytest.fixture
def recorder(monkeypatch):
    """Stand in the place of torch's flight recorder."""

    def record(*entries):
        dump = json.dumps({"entries": entries}).encode()
        module = SimpleNamespace(_dump_fr_trace_json=lambda: dump)
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)

    return record


ENTRIES = [
    ({}, op(5, group="default_pg")),
    ({"retired": True}, op(5, pending=False, group="default_pg")),
    ({"state": "completed"}, op(5, pending=False, group="default_pg")),
    ({"state": "started"}, op(5, group="default_pg")),
    ({"process_group": []}, op(5, group="?")),
    ({"process_group": ["7", ""]}, op(5, group="7")),
    ({"process_group": ["7", "undefined"]}, op(5, group="7")),  # a description that torch has made up
    ({"process_group": ["7", "tp"]}, op(5, group="tp")),
    (
        {"collective_seq_id": 0, "p2p_seq_id": 3, "profiling_name": "nccl:send 0->1"},
        op(3, "send 0->1", group="default_pg"),
    ),
    ({"profiling_name": "coalesced"}, op(5, "coalesced", group="default_pg")),
]


@of_each("case", ENTRIES)
def test_an_entry_of_the_flight_recorder_becomes_an_operation(recorder, case):
    recorder(entry(5, 100, **case[0]))
    assert recorded_operations(0) == [case[1]]


def test_without_torch_there_is_no_operation(monkeypatch):
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    assert recorded_operations(0) == []
    assert "torch" not in sys.modules


def test_the_flight_recorder_of_the_installed_torch_is_understood():
    code = """
import time, torch, torch.distributed as dist
from pytest_gpucluster.agreement.hang_diagnosis import recorded_operations
begin = time.time_ns()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
dist.barrier()
while any(o.pending for o in recorded_operations(begin)):  # it learns of an end a moment later
    assert time.time_ns() < begin + 20e9
print([(o.group, o.sequence, o.name, o.pending) for o in recorded_operations(begin)])
print(recorded_operations(time.time_ns()))
"""
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"}
    child = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert child.stdout.splitlines() == [
        "[('default_pg', 1, 'all_reduce', False), ('default_pg', 2, 'barrier', False)]",
        "[]",
    ], child.stderr


def test_nccls_own_recorder_is_read_too_and_one_that_cannot_be_read_hides_neither(recorder, monkeypatch):
    def broken():
        raise RuntimeError("no such recorder")

    recorder(entry(5, 100), entry(4, 99))
    module = sys.modules["torch._C._distributed_c10d"]
    module._dump_nccl_trace_json = lambda: json.dumps({"entries": [entry(7, 100)]})
    assert [o.sequence for o in recorded_operations(100)] == [5, 7], "what was entered before the phase is left out"
    module._dump_fr_trace_json = broken
    found = recorded_operations(0)
    assert [(operation.name, operation.pending) for operation in found] == [
        ("flight recorder (RuntimeError)", False),
        ("all_reduce", True),
    ]


def test_how_long_a_rank_waits_is_counted_from_the_oldest_collective_it_is_in_or_else_from_the_newest_it_has_left():
    def at_second(second, *, pending):
        return Operation(group="world", sequence=1, name="all_reduce", pending=pending, since_ns=int(second * 1e9))

    left, waits, unknown = at_second(5, pending=False), at_second(7, pending=True), op(1, group="unrecorded")
    now = 10 * 10**9
    assert hang_diagnosis.waits_seconds([left, waits, at_second(8, pending=True)], now) == 3
    assert hang_diagnosis.waits_seconds([left, unknown], now) == 5
    assert hang_diagnosis.waits_seconds([left], now) is None
    assert hang_diagnosis.waits_seconds([unknown], now) is None
