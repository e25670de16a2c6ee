"""The lines of a journal as rank 0 sends them: of the journal itself, of its recorder and of its reports."""

from pytest_gpucluster.journal.journal import JournalBuilder

RUN = {
    "type": "run",
    "schema_version": 1,
    "run_id": "r1",
    "started_at": "2026-01-02T03:04:05.678Z",
    "hostname": "gpu-01",
    "plugin_version": "0.1",
}


def described(name):
    return {"nodeid": f"t.py::test_{name}", "classname": "t", "name": f"test_{name}", "file": "t.py", "line": 12}


COLLECTED = {"type": "collected", "tests": [described(name) for name in "abc"]}


def start(name, deadline=300.0):
    at = "2026-01-02T03:04:10Z"
    return {"type": "start", "nodeid": f"t.py::test_{name}", "at": at, "deadline_seconds": deadline}


def result(name, outcome="passed", **more):
    message = "" if outcome == "passed" else f"{name} is {outcome}"
    times = {"started_at": "2026-01-02T03:04:10Z", "duration_seconds": 1.23456, "call_seconds": 1.0}
    return {"type": "test", **described(name), "outcome": outcome, "message": message, **times, **more}


def problem(message, outcome="error", *, name="preflight", text="details"):
    return {"type": "problem", "name": name, "outcome": outcome, "message": message, "text": text}


def end(verdict="ACCEPTED", code=0, reason="all criteria passed"):
    at = "2026-01-02T03:05:05.678Z"
    return {"type": "end", "verdict": verdict, "exit": code, "reason": reason, "at": at, "by": "rank 0"}


def journal_of(lines):
    """Return the journal of these lines."""
    builder = JournalBuilder()
    for line in lines:
        builder.add(line)
    return builder.journal()
