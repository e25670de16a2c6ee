"""One round of the soak: a short rehearsal with a fault in it, and whether it has ended as it should."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import jsonschema
import torchrun
import xmlschema
from soak_faults import HOST, RANKS, TESTS, Expected, Plan, after, expected
from soak_leftovers import Observer

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal import journal
from pytest_gpucluster.reports.results_json import results_schema

SUITE = Path(__file__).parent / "soak_suite"
_SUITE_FILES = ("conftest.py", "planting.py", "test_round.py")
_MANIFEST = "".join(f"test_round.py::{name}\n" for name in TESTS)
DEADLINE_SECONDS = 240.0
"""Of a round. It needs about ten seconds on an idle machine, and all time that something may take in it is bounded."""
ENDS_WITHIN_SECONDS = 60.0
"""From a fault to the end of its launcher, beside the deadline of the test. Where the run goes on, its other tests take
a few seconds; where the fault ends it, by the documented bounds: 1 s grace, 2 s stuck (as set here), 10 s until the
others go on without a rank 0 that is silent, 10 s for the reports, 10 s that others wait for those, 20 s terminate."""
_TIMEOUTS = "stuck=2"
_PAUSE_SECONDS = 1.5
_TOO_SLOW = "skipped: too slow to rehearse"
"""What a rehearsal says of a test that a busy machine has kept from settling. The verdict counts it."""
_DISK_BYTES = "4m"
_MOUNTED = """
mount -t tmpfs -o size={size} none "$SOAK_DISK" || exit 97
"$@"; code=$?
cp -a "$SOAK_DISK/." "$SOAK_KEPT" || exit 98
exit $code
"""
_LEFT_BY_TORCHRUN = "torchelastic_"
"""torchrun leaves its folder of logs in TMPDIR, empty, whatever it runs. `gpucluster run` does not."""
_UNREADABLE = (
    AssertionError,
    OSError,
    ValueError,
    LookupError,
    SyntaxError,
    JournalError,
    xmlschema.XMLSchemaException,
)
"""What is raised by a report that is not there, is malformed (ElementTree's ParseError is a SyntaxError) or invalid."""
_REPORTS = ("journal.jsonl", "report.html", "results.json", "metrics.prom")


@dataclass(kw_only=True)
class Round:
    """How a round has ended. ``wrong``: what is not as it should be, each in a few words, by the kind of check."""

    number: int
    plan: Plan
    directory: Path
    seconds: float = 0.0
    ended_at: float = 0.0
    """By the clock of the day; 0 if it was ended by force."""
    said: str = "no report"
    in_time: bool = True
    is_named: bool = True
    left_behind: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Tell whether everything is as it should be."""
        return self.in_time and self.is_named and not self.left_behind and not self.wrong

    @property
    def complaint(self) -> str:
        """Return in one line what is wrong."""
        left = [f"left behind: {what}" for what in self.left_behind]
        return "; ".join(" ".join(what.split()) for what in [*self.wrong, *left])


def run(number: int, plan: Plan, directory: Path, *, forked: bool = False) -> Round:
    """Run a round in a folder, and check all that it says and leaves.

    Args:
        forked: torchrun's agent and ranks are forks of one process where they can be (tests/fork_server.py).
    """
    found = Round(number=number, plan=plan, directory=directory)
    begin = time.monotonic()
    started = start(plan, directory, forked=forked)
    with Observer(started.token, [agent.pid for agent in started.agents]) as observer:
        try:
            if plan.fault == "pause":
                _go_on_after_pause(started, plan)
            started.wait()
            found.ended_at = time.time()
        except AssertionError as error:  # what tests/torchrun.py says of a deadline that has passed
            found.in_time = False
            found.wrong.append(str(error).splitlines()[0])
        except SyntaxError as error:  # ElementTree's ParseError is one: while it ran, the report was not well-formed
            found.wrong.append(f"the JUnit file was not well-formed while the run went on: {error}")
    found.seconds = time.monotonic() - begin
    promised: list[str] = []
    if plan.launcher == "torchrun":
        promised += [path.name for path in (directory / "tmp").glob(f"{_LEFT_BY_TORCHRUN}*")]
    judge(found, started, promised)
    # While it is killed at its end, what had stayed is noted by tests/torchrun.py itself.
    found.left_behind = [f"process {left}" for left in started.left_over]
    found.left_behind += observer.leftovers(directory / "tmp", promised)
    return found


def judge(found: Round, run: torchrun.Run, promised: list[str]) -> None:
    """Note what is wrong with the reports of a round, and what it promises to leave in TMPDIR."""
    try:
        for wrong in _wrong_with_reports(found, run, promised):
            found.wrong.append(wrong)
    except _UNREADABLE as error:
        found.is_named = False
        found.wrong.append(f"{type(error).__name__}: {(str(error).splitlines() or ['no word of it'])[0]}")


def start(plan: Plan, directory: Path, *, forked: bool = False) -> torchrun.Run:
    """Start the run of a round."""
    files = {name: (SUITE / name).read_text(encoding="utf-8") for name in _SUITE_FILES}
    files["criteria.txt"] = _MANIFEST
    files["one_fault.py"] = (torchrun.SUITES / "one_fault.py").read_text(encoding="utf-8")
    disk, kept = directory / "disk", directory / "kept"
    for folder in (disk, kept):
        folder.mkdir()
    options = [] if plan.captured else ["-s"]
    before: list[str] = []
    if plan.kind == "disk":
        options += [f"--gpucluster-report-dir={disk / 'reports'}", f"--junitxml={disk / 'report.xml'}"]
        before = ["unshare", "-Urm", "sh", "-c", _MOUNTED.format(size=_DISK_BYTES), "sh"]
    environment = {
        "SOAK_PLAN": plan.told_to_ranks(),
        "SOAK_DISK": str(disk),
        "SOAK_KEPT": str(kept),
        "FAULT": plan.fault,
        "VICTIM": str(plan.victim),
    }
    started = torchrun.start(
        directory,
        files,
        *options,
        ranks=RANKS,
        hosts=(HOST,),
        timeouts=_TIMEOUTS,
        deadline=plan.deadline_seconds,
        environment=environment,
        before=before,
        by_command=plan.launcher == "gpucluster run",
        forked=forked,
    )
    started.deadline = DEADLINE_SECONDS
    return started


def _go_on_after_pause(run: torchrun.Run, plan: Plan) -> None:
    stopped = run.wait_for_stamp("fault", plan.victim)
    time.sleep(_PAUSE_SECONDS)
    os.kill(stopped.pid, signal.SIGCONT)


def _wrong_with_reports(found: Round, run: torchrun.Run, promised: list[str]) -> Iterator[str]:
    """Say what is wrong with what the run has said; note what it promises to leave in TMPDIR."""
    plan = found.plan
    root = run.directory
    if plan.kind == "disk":
        root = run.directory / "kept"
        torchrun.require_junit((root / "report.xml").read_text(encoding="utf-8"))  # complete, if not of the end
    if plan.fault == "fill_disk":
        yield from _wrong_with_rescue(run, promised)
        rescued = (path.parent for path in (run.directory / "tmp").glob("gpucluster-*/report.xml"))
        root = next(rescued, root)
    said = _seen_in(run, root).verdicts
    must = _expected(plan, said)
    yield from _wrong_with_junit(found, said, must)
    code = run.exits[0] if run.exits else None
    allowed = must.exit if plan.launcher == "gpucluster run" else min(must.exit, 1)
    if code != allowed:
        yield f"{plan.launcher} ended with {code}, not {allowed}"
    # A rank 0 that is gone says nothing more.
    speaks = plan.kind != "start" and not (plan.victim == 0 and must.ends_the_run)
    if f"{must.verdict} (a REHEARSAL" not in run.output and speaks:
        yield f"the terminal does not say {must.verdict}"
    folder = root if plan.fault == "fill_disk" else root / "reports" / "latest"
    if plan.kind != "start":  # of the launch alone: it may have no journal
        yield from _wrong_with_folder(plan, folder, must)
    since = run.find_stamp("fault", plan.victim)
    if since is not None and found.ended_at:
        late = found.ended_at - since.at - plan.deadline_seconds * (plan.kind != "kill")
        if late > ENDS_WITHIN_SECONDS:
            found.in_time = False
            yield f"it ended {late:.0f} s after the fault; {ENDS_WITHIN_SECONDS:.0f} s are allowed"


def _seen_in(run: torchrun.Run, root: Path) -> torchrun.Run:
    """Return the run as it is seen in another folder."""
    if root == run.directory:
        return run
    return torchrun.Run(directory=root, agents=[], token=run.token, started=run.started, deadline=run.deadline)


def _wrong_with_rescue(run: torchrun.Run, promised: list[str]) -> Iterator[str]:
    output = "".join(run.output.split())  # a path may be broken at the end of a line
    copies = [path for path in (run.directory / "tmp").glob("gpucluster-*") if (path / "report.xml").exists()]
    named = [path.name for path in copies if f"completecopiesarein{path}" in output]
    promised += named
    if len(named) != 1:
        yield f"{len(named)} rescued reports are named, of {len(copies)}"
    if "Nospaceleftondevice" not in output:
        yield "nobody says that there is no space left on the device"


def _expected(plan: Plan, said: Mapping[str, str]) -> Expected:
    """Return what must come of a plan. A rehearsal in which a test was too slow is complete at no time."""
    must = expected(plan)
    if must.exit == 0 and any(text.startswith(_TOO_SLOW) for text in said.values()):
        return replace(must, verdict="INCOMPLETE", exit=10)
    return must


def _wrong_with_junit(found: Round, said: Mapping[str, str], must: Expected) -> Iterator[str]:
    plan = found.plan
    struck = said.get(plan.shown_in, "not in the report")
    found.said = struck if len(struck) < 110 else f"{struck[:107]}..."
    outcome, _, message = struck.partition(": ")
    found.is_named = outcome == must.outcome and all(words in message for words in must.says)
    found.is_named |= must.outcome == "passed" and struck.startswith(_TOO_SLOW)
    if not found.is_named:
        yield f"{plan.shown_in} should be {must.outcome} {' '.join(must.says)}, and is {struck}"
    for name in TESTS:
        if plan.kind == "start":
            if name in said:
                yield f"{name} should not be in the report, and is {said[name]!r}"
            continue
        if name == plan.shown_in:
            continue
        should = "skipped: not run: " if must.ends_the_run and name in (plan.test, *after(plan.test)) else "passed"
        found_here = said.get(name, "not in the report")
        too_slow = should == "passed" and found_here.startswith(_TOO_SLOW)
        if not found_here.startswith(should) and not too_slow:
            yield f"{name} should be {should!r}, and is {said.get(name)!r}"


def _wrong_with_folder(plan: Plan, folder: Path, must: Expected) -> Iterator[str]:
    told = journal.read(folder / "journal.jsonl")
    if (told.verdict, told.exit) != (must.verdict, must.exit) and plan.fault != "fill_disk":
        yield f"the journal says {told.verdict}, {told.exit}, not {must.verdict}, {must.exit}"
    if told.end is None:
        yield "the journal has no end"
    if plan.fault == "fill_disk":
        return  # the other reports are not promised beside a journal that is not whole
    missing = [name for name in _REPORTS if not (folder / name).is_file()]
    if missing:
        yield f"missing: {', '.join(missing)}"
        return
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    try:
        jsonschema.validate(results, results_schema())
    except jsonschema.ValidationError as error:
        yield f"results.json: {error.message[:200]}"
    if not (folder / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>"):
        yield "report.html is cut off"
