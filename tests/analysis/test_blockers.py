"""Whatever is wrong with a run keeps it from being accepted, also where its closing line says ACCEPTED."""

import re
from dataclasses import replace

from each import of_each
from journal_lines import journal_of
from made_records import line_of, lines

from pytest_gpucluster.analysis.certificate_blockers import blockers


def test_an_accepted_run_has_no_blockers():
    assert blockers(journal_of(lines())) == ()


def _judged(found):
    return [judged for line in found if line["type"] == "test" for judged in line["measurements"]]


def _value(found):
    """Return a value that was compared with a limit, and not by its own test alone."""
    return next(judged for judged in _judged(found) if judged["metric"] == "matmul.bf16.tflops" and judged["limit"])


def _ranks(found):
    return line_of(found, "cluster")["ranks"]


def _like_the_first(rank):
    """Add a rank like the first one but for its GPU."""

    def add(found):
        first = _ranks(found)[0]
        _ranks(found).append({**first, "gpu": {**first["gpu"], "uuid": "GPU-another"}, "rank": rank})

    return add


def _drop(kind):
    def drop(found):
        found[:] = [line for line in found if line["type"] != kind]

    return drop


def _line(kind, **values):
    """Change the first line of a kind."""
    return lambda found: line_of(found, kind).update(values)


def _rank_3(**values):
    return lambda found: _ranks(found)[3].update(values)


def _gpu_3(**values):
    return lambda found: _ranks(found)[3]["gpu"].update(values)


def _of_rank_4(found):
    return _ranks(found)[4]["gpu"]["uuid"]


def _digest(sha256):
    return lambda found: line_of(found, "limits")["files"][0].update(sha256=sha256)


def _next_to_last(**line):
    return lambda found: found.insert(-1, line)


X = {"nodeid": "t.py::test_x"}
CHANGES = {
    "no end": (_drop("end"), "closing line"),
    "rehearsal": (_line("run", rehearsal=True), "REHEARSAL"),
    "selection": (_line("run", selection=True), "selection"),
    "rejected": (_line("end", verdict="REJECTED", exit=1), "REJECTED"),
    "selection passed": (_line("end", verdict="SELECTION PASSED"), "SELECTION PASSED"),
    "another exit code": (_line("end", exit=10), "exit code 10"),
    "a failed test": (_line("test", outcome="failed"), r"\(failed\)"),
    "a broken test": (_line("test", outcome="error"), r"\(error\)"),
    "a missed value in a test that passed": (
        lambda found: line_of(found, "test")["measurements"][0].update(status="failed"),
        "passed, with a value",
    ),
    "a test that never ended": (_next_to_last(type="start", **X), "t.py::test_x never"),
    "a test that never ran": (lambda found: line_of(found, "collected")["tests"].append(X), "t.py::test_x: never"),
    "a problem": (_next_to_last(type="problem", name="rank lost", message="m"), "rank lost: "),
    "no criterion": (
        lambda found: [line.update(criterion=None) for line in found if line["type"] == "test"],
        "SELECTION PASSED",
    ),
    "a problem before the first test": (_line("cluster", problems=["driver differs"]), "driver differs: "),
    "no cluster": (_drop("cluster"), "the cluster"),
    "an unknown rank": (lambda found: _ranks(found).pop(5), "rank 5"),
    "a GPU without a UUID": (_gpu_3(uuid=None), "UUID .* rank 3"),
    "a rank without a GPU": (_rank_3(gpu=None), "UUID .* rank 3"),
    "no UUID but words": (_gpu_3(uuid="[Not Supported]"), "UUID .* rank 3"),
    "a GPU twice": (lambda found: _gpu_3(uuid=_of_rank_4(found))(found), "more than one rank"),
    "a GPU twice in other letters": (lambda found: _gpu_3(uuid=_of_rank_4(found).upper())(found), "more than one rank"),
    "another GPU than was judged": (_gpu_3(name="NVIDIA A100"), "NVIDIA A100: .* NVIDIA H100 80GB HBM3"),
    "no list of tests": (_drop("collected"), "collected tests"),
    "a run without a name": (_line("run", run_id=""), "run id"),
    "on cpu": (_line("run", device="cpu"), "REHEARSAL on cpu"),
    "on a simulated cluster": (_line("run", device="simulated"), "SIMULATED cluster"),
    "on another device": (_line("run", device="tpu"), "on tpu, not on cuda"),
    "a test that was taken out": (
        lambda found: (found.remove(line_of(found, "test")), line_of(found, "collected")["tests"].pop(0)),
        "14 passed, .* 13",
    ),
    "a test that did not run by the last line": (_line("end", not_run=["t.py::test_x"]), "t.py::test_x: did not"),
    "a required test that was skipped": (_line("test", outcome="skipped"), "ACCEPTED, .* INCOMPLETE"),
    "a criterion that nothing judged": (_line("test", unjudged="no limit"), "INCOMPLETE: not judged"),
    "a criterion that was required and is not there": (
        lambda found: found[0]["options"].update(require={"value": "soak", "origin": "command line"}),
        r"soak \(required",
    ),
    "a criterion that measured nothing": (_line("test", measurements=[]), "measured nothing"),
    "no value that was judged": (
        lambda found: [judged.update(status="recorded", limit=None) for judged in _judged(found)],
        "no value",
    ),
    "a value below its limit": (lambda found: _value(found).update(value=1.0), "not by its own figures"),
    "silence at the end": (lambda found: found.append({"type": "silence", "message": "gone"}), "silence: gone"),
    "a rank too many": (_like_the_first(16), "rank 16 "),
    "a rank twice": (_like_the_first(3), "rank 3 .*once"),
    "a node too few": (_line("run", nnodes=3), "2 nodes, .* 3"),
    "a host without a name": (_rank_3(host=""), "host .* rank 3"),
    "limits of a rehearsal": (_line("limits", sku="cpu-rehearsal"), "cpu-rehearsal"),
    "no limits": (_drop("limits"), "SKU"),
    "an unknown SKU": (_line("limits", sku=None), "SKU"),
    "no files of limits": (_line("limits", files=[]), "files of limits"),
    "half a digest": (_digest("ab12"), "no recorded digest"),
    "a file without a digest": (_digest(""), "no recorded digest"),
}


@of_each("name", list(CHANGES))
def test_each_fault_is_a_blocker_of_its_own(name):
    change, why = CHANGES[name]
    found = lines()
    change(found)
    reasons = blockers(journal_of(found))
    assert any(re.search(why, blocker) for blocker in reasons), reasons


def test_a_journal_that_is_cut_off_accepts_nothing_and_no_other_run_does():
    assert len(blockers(replace(journal_of(lines()), cut=True))) == 1
    assert [
        name for name in ("cluster", "rehearsal", "broken", "hostile") if not blockers(journal_of(lines(name)))
    ] == []
