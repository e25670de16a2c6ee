"""The lines of a journal as rank 0 sends them: of the journal itself, of its recorder and of its reports."""

from __future__ import annotations

from typing import Any

Line = dict[str, Any]
RUN: Line = {
    "type": "run",
    "schema_version": 1,
    "run_id": "r1",
    "started_at": "2026-01-02T03:04:05.678Z",
    "hostname": "gpu-01",
    "plugin_version": "0.1",
}


def described(name: str) -> Line:
    return {"nodeid": f"t.py::test_{name}", "classname": "t", "name": f"test_{name}", "file": "t.py", "line": 12}


COLLECTED: Line = {"type": "collected", "tests": [described(name) for name in "abc"]}


def start(name: str, deadline: float = 300.0) -> Line:
    at = "2026-01-02T03:04:10Z"
    return {"type": "start", "nodeid": f"t.py::test_{name}", "at": at, "deadline_seconds": deadline}


def result(name: str, outcome: str = "passed", **more: Any) -> Line:
    message = "" if outcome == "passed" else f"{name} is {outcome}"
    times = {"started_at": "2026-01-02T03:04:10Z", "duration_seconds": 1.23456, "call_seconds": 1.0}
    return {"type": "test", **described(name), "outcome": outcome, "message": message, **times, **more}


def problem(message: str, outcome: str = "error", *, name: str = "preflight", text: str = "details") -> Line:
    return {"type": "problem", "name": name, "outcome": outcome, "message": message, "text": text}


def end(verdict: str = "ACCEPTED", code: int = 0, reason: str = "all criteria passed") -> Line:
    at = "2026-01-02T03:05:05.678Z"
    return {"type": "end", "verdict": verdict, "exit": code, "reason": reason, "at": at, "by": "rank 0"}
