"""The planted fault of a round of the soak, drawn from a seed, and the expected result.

Every round is drawn for itself from the seed and its number, so that it can be repeated without those before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random

HOST = "node-a"
RANKS = 2
DEADLINE_SECONDS = 6.0
"""Of a phase of the struck test, where a rank does not return. All others have plenty."""
PLENTY_SECONDS = 90.0

TESTS = ("test_plain", "test_matmul", "test_all_reduce", "test_meeting")
"""The suite of a round (soak_suite/test_round.py), in its order."""
MOMENTS = ("set-up", "before", "inside", "after", "teardown")
_COLLECTIVE = "test_all_reduce"
_MEASURED = ("test_matmul", _COLLECTIVE)
"""Only these have an inside: the k-th product, or sum, of the benchmark."""
START = "rank lost"
"""Name in the report of a rank that fails before the roll call: then there are no tests."""

KINDS: Mapping[str, Sequence[str]] = {
    "none": ("none",),
    "kill": ("kill", "crash", "leave_with_3", "leave_with_0"),
    "stop": ("stop", "pause"),
    "raise": ("raise_error", "raise_assertion", "raise_exit"),
    "hang": ("wait", "lock", "loop", "absent", "other_collective", "hang_in_c", "hold_the_gil"),
    "garbage": ("print_garbage", "raise_garbage"),
    "disk": ("fill_disk", "fill_disk_for_a_while"),
    "start": ("end_at_start", "end_with_0_at_start", "raise_at_start"),
    "unnoticed": ("drop_test", "leave_out_test", "change_exit", "exit_with_0"),
}
"""Kind -> faults of it, by the name of the function that makes it: in soak_suite/planting.py, or in one_fault.py of
tests/faults/suites. Those of "unnoticed" would pass: a test that no rank runs, or one rank does not, and a failure
whose exit code a plugin or an atexit handler changes to 0."""

_SURVIVED = {"none", "pause", "print_garbage", "fill_disk_for_a_while"}
"""After these the run is as good as without them."""
_FATAL = {*KINDS["kill"], "stop", "hang_in_c", "hold_the_gil"}
"""These end the run: no test after them is run."""
_AROUND_TESTS = {"drop_test", "leave_out_test"}
"""These are made by the conftest, before the test would begin."""
_OF_COLLECTIVES = {"absent", "other_collective"}
_ERROR_TYPES = {
    "change_exit": "AssertionError",
    "exit_with_0": "AssertionError",
    "raise_exit": "SystemExit",
    "raise_assertion": "AssertionError",
    "raise_error": "RuntimeError",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A planted fault of a kind: on which rank, in which test, at which moment.

    ``call``: in which product or sum it happens inside a benchmark. ``launcher`` is "torchrun" or "gpucluster run",
    which alone keeps the exit code. ``captured``: whether pytest captures output, or -s was given.
    """

    kind: str
    fault: str
    victim: int
    test: str
    moment: str
    call: int
    launcher: str
    captured: bool

    def for_ranks(self) -> str:
        """Return it as the suite reads it."""
        return json.dumps({**asdict(self), "deadline": self.deadline_seconds, "plenty": PLENTY_SECONDS})

    @property
    def deadline_seconds(self) -> float:
        """Return the deadline of a phase of the struck test."""
        return DEADLINE_SECONDS if self.kind == "hang" or self.fault == "stop" else PLENTY_SECONDS

    @property
    def reported_test(self) -> str:
        """Return the failed test in the report: where rank 0 leaves one out, the ranks differ at the next."""
        later = after(self.test)
        return later[0] if later and (self.fault, self.victim) == ("leave_out_test", 0) else self.test

    @property
    def name(self) -> str:
        """Return it in a few words."""
        if self.kind == "none":
            return "none"
        return f"{self.fault} {self.moment} {self.test}"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The expected result.

    Attributes:
        verdict, exit: of the table of exit codes in DESIGN.md and the README.
        outcome: of the struck test: "passed", "failure", "error" or "skipped".
        words: in the message of the struck test: the culprit, and its fault.
        ends_the_run: the tests after it are "not run".
    """

    verdict: str
    exit: int
    outcome: str
    words: tuple[str, ...] = ()
    ends_the_run: bool = False


def draw(seed: int, number: int, kinds: Sequence[str] = tuple(KINDS)) -> Plan:
    """Return the plan of a round. Each kind comes once in as many rounds as there are kinds.

    Args:
        number: of the round, from 1.
        kinds: names of KINDS.
    """
    block, place = divmod(number - 1, len(kinds))
    order = Random(f"{seed} order {block}").sample(list(kinds), len(kinds))
    random = Random(f"{seed} round {number}")
    kind = order[place]
    fault = random.choice(KINDS[kind])
    tests = TESTS[:-1] if fault == "fill_disk_for_a_while" else TESTS  # the next test makes room again
    tests = (_COLLECTIVE,) if fault == "loop" else (START,) if kind == "start" else tests
    test = random.choice(tests)
    return Plan(
        kind=kind,
        fault=fault,
        victim=random.randrange(RANKS),
        test=test,
        moment=random.choice(_moments(fault, test)),
        call=random.randint(1, 4),
        launcher=random.choice(("torchrun", "gpucluster run")),
        captured=random.random() < 0.5,
    )


def _moments(fault: str, test: str) -> tuple[str, ...]:
    if test == START:
        return ("in the conftest",)
    if fault in _AROUND_TESTS:
        return ("before",)
    if fault in _OF_COLLECTIVES:
        return ("before", "after")  # where ranks are in step
    if fault == "loop":
        return ("before", "inside")  # where its peer waits for it: else a rehearsal counts it as slow
    # A rank that pauses inside a measurement would rightly be slow. After a fixture's SystemExit pytest 9.2 refuses to
    # set the fixture up again (FixtureDef.execute: assert not self._finalizers), so that each later test ends in that.
    never = {"pause": "inside", "raise_exit": "set-up"}.get(fault)
    return tuple(moment for moment in MOMENTS if moment != never and (test in _MEASURED or moment != "inside"))


def expected(plan: Plan) -> Expected:
    """Return the expected result of a plan."""
    if plan.fault in _SURVIVED:
        return Expected(verdict="REHEARSED", exit=0, outcome="passed")
    if plan.fault == "fill_disk":
        # No test fails; the run is not accepted because its journal is incomplete.
        return Expected(verdict="BROKEN", exit=11, outcome="passed")
    if plan.fault == "drop_test":
        return Expected(verdict="INCOMPLETE", exit=10, outcome="skipped", words=("criteria.txt",))
    culprit = f"rank {plan.victim} ({HOST}"
    if plan.fault == "leave_out_test":
        # The ranks differ where this test begins or, after the last one, at the end of the session.
        return Expected(verdict="BROKEN", exit=11, outcome="error", words=("out of step",), ends_the_run=True)
    if plan.kind == "start":
        how = "RuntimeError: planted" if plan.fault == "raise_at_start" else "ended without a message"
        return Expected(verdict="BROKEN", exit=11, outcome="error", words=(culprit, how), ends_the_run=True)
    if plan.fault in _FATAL:
        return Expected(verdict="BROKEN", exit=11, outcome="error", words=(culprit,), ends_the_run=True)
    if plan.kind == "hang":
        # Of two ranks in two collectives either may be right: both are named, the second in the message of the first.
        # A rank that is absent before the all-reduce benchmark continues into the next collective, which is its own.
        is_in_another = plan.fault == "other_collective" or (
            (plan.fault, plan.test, plan.moment) == ("absent", "test_all_reduce", "before")
        )
        both = (f"rank 0 ({HOST}): waits in ", ", while rank 1 waits in ", " (and rank 1 failing)")
        words = both if is_in_another else (culprit,)
        return Expected(verdict="BROKEN", exit=11, outcome="error", words=words)
    words = (f"{culprit}): {_ERROR_TYPES.get(plan.fault, 'RuntimeError')}",)
    if plan.moment in ("set-up", "teardown"):
        where = "in setup" if plan.moment == "set-up" else "in teardown"
        return Expected(verdict="BROKEN", exit=11, outcome="error", words=(where, *words))
    return Expected(verdict="REJECTED", exit=1, outcome="failure", words=words)


def after(test: str) -> tuple[str, ...]:
    """Return the tests that come after one."""
    return () if test == START else TESTS[TESTS.index(test) + 1 :]
