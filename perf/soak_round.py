"""One round of the soak: a short rehearsal with a fault in it, and whether its result is as expected."""

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
from junit_files import require_junit
from soak_faults import HOST, RANKS, TESTS, Expected, Plan, after, expected
from soak_leftovers import Observer

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal import journal
from pytest_gpucluster.reports.results_json import results_schema

SUITE = Path(__file__).parent / "soak_suite"
_SUITE_FILES = ("conftest.py", "planting.py", "test_round.py")
_MANIFEST = "".join(f"test_round.py::{name}\n" for name in TESTS)
DEADLINE_SECONDS = 240.0
"""Of a round. It needs about ten seconds on an idle machine, and every wait in it is bounded."""
ENDS_WITHIN_SECONDS = 60.0
"""From a fault to the end of its launcher, besides the deadline of the test. Where the run continues, its other tests
take a few seconds; where the fault ends it, by the documented bounds: 1 s grace, 2 s stuck (as set here), 10 s until
the others continue without a silent rank 0, 10 s for the reports, 10 s that others wait for those, 20 s terminate."""
_TIMEOUTS = "stuck=2"
_PAUSE_SECONDS = 1.5
_TOO_SLOW = "skipped: too slow to rehearse"
"""In a rehearsal, of a test that did not settle on a busy machine. The verdict counts it."""
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
"""Raised by a report that is missing, malformed (ElementTree's ParseError is a SyntaxError) or invalid."""
_REPORTS = ("journal.jsonl", "report.html", "results.json", "metrics.prom")


@dataclass(kw_only=True)
class Round:
    """The result of a round. ``problems``: each in a few words."""

    number: int
    plan: Plan
    directory: Path
    seconds: float = 0.0
    ended_at: float = 0.0
    """Unix time; 0 if it was ended by force."""
    reported: str = "no report"
    in_time: bool = True
    is_named: bool = True
    left_behind: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether everything is as expected."""
        return self.in_time and self.is_named and not self.left_behind and not self.problems

    @property
    def complaint(self) -> str:
        """Return all problems in one line."""
        left = [f"left behind: {leftover}" for leftover in self.left_behind]
        return "; ".join(" ".join(text.split()) for text in [*self.problems, *left])


def run(number: int, plan: Plan, directory: Path, *, forked: bool = False) -> Round:
    """Run a round in a folder, and check its reports and leftovers.

    Args:
        forked: torchrun's agent and ranks are forks of one process where they can be (session/fork_server.py).
    """
    found = Round(number=number, plan=plan, directory=directory)
    begin = time.monotonic()
    started = start(plan, directory, forked=forked)
    with Observer(started.token, [agent.pid for agent in started.agents]) as observer:
        try:
            if plan.fault == "pause":
                _continue_after_pause(started, plan)
            started.wait()
            found.ended_at = time.time()
        except AssertionError as error:  # from tests/torchrun.py: a deadline has passed
            found.in_time = False
            found.problems.append(str(error).splitlines()[0])
        except SyntaxError as error:  # ElementTree's ParseError is one: during the run the report was not well-formed
            found.problems.append(f"the JUnit file was not well-formed during the run: {error}")
    found.seconds = time.monotonic() - begin
    promised: list[str] = []
    if plan.launcher == "torchrun":
        promised += [path.name for path in (directory / "tmp").glob(f"{_LEFT_BY_TORCHRUN}*")]
    judge(found, started, promised)
    # tests/torchrun.py records the processes that it kills at the end.
    found.left_behind = [f"process {left}" for left in started.left_over]
    found.left_behind += observer.leftovers(directory / "tmp", promised)
    return found


def judge(found: Round, run: torchrun.Run, promised: list[str]) -> None:
    """Add the problems of a round's reports, and the names that it announces in TMPDIR."""
    try:
        for problem in _report_problems(found, run, promised):
            found.problems.append(problem)
    except _UNREADABLE as error:
        found.is_named = False
        found.problems.append(f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}")


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
        "SOAK_PLAN": plan.for_ranks(),
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


def _continue_after_pause(run: torchrun.Run, plan: Plan) -> None:
    stopped = run.wait_for_stamp("fault", plan.victim)
    time.sleep(_PAUSE_SECONDS)
    os.kill(stopped.pid, signal.SIGCONT)


def _report_problems(found: Round, run: torchrun.Run, promised: list[str]) -> Iterator[str]:
    """Yield the problems of a run's reports; add the names that it announces in TMPDIR."""
    plan = found.plan
    root = run.directory
    if plan.kind == "disk":
        root = run.directory / "kept"
        require_junit((root / "report.xml").read_text(encoding="utf-8"))  # complete, if not of the end
    if plan.fault == "fill_disk":
        yield from _rescue_problems(run, promised)
        rescued = (path.parent for path in (run.directory / "tmp").glob("gpucluster-*/report.xml"))
        root = next(rescued, root)
    verdicts = _in_folder(run, root).verdicts
    must = _expected(plan, verdicts)
    yield from _junit_problems(found, verdicts, must)
    code = run.exits[0] if run.exits else None
    allowed = must.exit if plan.launcher == "gpucluster run" else min(must.exit, 1)
    if code != allowed:
        yield f"{plan.launcher} ended with {code}, not {allowed}"
    # A rank 0 that has crashed prints nothing more.
    prints = plan.kind != "start" and not (plan.victim == 0 and must.ends_the_run)
    if f"REHEARSAL, {must.verdict} (" not in run.output and prints:
        yield f"the terminal does not have {must.verdict}"
    folder = root if plan.fault == "fill_disk" else root / "reports" / "latest"
    if plan.kind != "start":  # a failed launch may have no journal
        yield from _folder_problems(plan, folder, must)
    since = run.find_stamp("fault", plan.victim)
    if since is not None and found.ended_at:
        late = found.ended_at - since.at - plan.deadline_seconds * (plan.kind != "kill")
        if late > ENDS_WITHIN_SECONDS:
            found.in_time = False
            yield f"it ended {late:.0f} s after the fault; {ENDS_WITHIN_SECONDS:.0f} s are allowed"


def _in_folder(run: torchrun.Run, root: Path) -> torchrun.Run:
    """Return the run with the reports of another folder."""
    if root == run.directory:
        return run
    return torchrun.Run(directory=root, agents=[], token=run.token, started=run.started, deadline=run.deadline)


def _rescue_problems(run: torchrun.Run, promised: list[str]) -> Iterator[str]:
    output = "".join(run.output.split())  # a path may be broken at the end of a line
    copies = [path for path in (run.directory / "tmp").glob("gpucluster-*") if (path / "report.xml").exists()]
    named = [path.name for path in copies if f"completecopiesarein{path}" in output]
    promised += named
    if len(named) != 1:
        yield f"{len(named)} of {len(copies)} rescued reports are named"
    if "Nospaceleftondevice" not in output:
        yield "no message that there is no space left on the device"


def _expected(plan: Plan, verdicts: Mapping[str, str]) -> Expected:
    """Return the expected result. A rehearsal with a test that was too slow is never complete."""
    must = expected(plan)
    if must.exit == 0 and any(text.startswith(_TOO_SLOW) for text in verdicts.values()):
        return replace(must, verdict="INCOMPLETE", exit=10)
    return must


def _junit_problems(found: Round, verdicts: Mapping[str, str], must: Expected) -> Iterator[str]:
    plan = found.plan
    struck = verdicts.get(plan.reported_test, "not in the report")
    found.reported = struck if len(struck) < 110 else f"{struck[:107]}..."
    outcome, _, message = struck.partition(": ")
    found.is_named = outcome == must.outcome and all(words in message for words in must.words)
    found.is_named |= must.outcome == "passed" and struck.startswith(_TOO_SLOW)
    if not found.is_named:
        yield f"{plan.reported_test} should be {must.outcome} {' '.join(must.words)}, and is {struck}"
    for name in TESTS:
        if plan.kind == "start":
            if name in verdicts:
                yield f"{name} should not be in the report, and is {verdicts[name]!r}"
            continue
        if name == plan.reported_test:
            continue
        should = "skipped: not run: " if must.ends_the_run and name in (plan.test, *after(plan.test)) else "passed"
        found_here = verdicts.get(name, "not in the report")
        too_slow = should == "passed" and found_here.startswith(_TOO_SLOW)
        if not found_here.startswith(should) and not too_slow:
            yield f"{name} should be {should!r}, and is {verdicts.get(name)!r}"


def _folder_problems(plan: Plan, folder: Path, must: Expected) -> Iterator[str]:
    found = journal.read(folder / "journal.jsonl")
    if (found.verdict, found.exit) != (must.verdict, must.exit) and plan.fault != "fill_disk":
        yield f"the journal has {found.verdict}, {found.exit}, not {must.verdict}, {must.exit}"
    if found.end is None:
        yield "the journal has no end"
    if plan.fault == "fill_disk":
        return  # with an incomplete journal the other reports are not promised
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
