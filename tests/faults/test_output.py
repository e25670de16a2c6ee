"""Hostile output, names and disks, and the end of everything at once."""

import errno
import os
import xml.etree.ElementTree as ET

from junit_files import require_junit
from times import DEATH
from torchrun import start, suite, torchrun

from pytest_gpucluster.journal import journal

HOSTILE = {
    "test_hostile.py": """
        import os
        import pytest
        from stamps import RANK, all_reduce, meet, stamp

        GARBAGE = bytes(range(256))

        @pytest.mark.parametrize("text", ["nul\\x00", "\\x1b[31m", "]]><&", "\\udc80", "\\ufffe", "\\r", "ü" * 300])
        def test_id(cluster, text):
            os.write(1, GARBAGE)
            os.write(2, GARBAGE)
            all_reduce(cluster)
            if RANK == 1:
                raise RuntimeError(text)

        def test_after(cluster):
            meet(cluster, "hostile")
    """
}
NO_ESCAPING = "disable_test_id_escaping_and_forfeit_all_rights_to_community_support = True\n"


def test_hostile_bytes_in_output_ids_and_host_names_leave_a_valid_report(tmp_path):
    host = b"no\xffde\x1b[31m ]]><&\"'\xed\xa0\x80"
    environment = {"GPUCLUSTER_HOSTNAME": host}
    run = torchrun(tmp_path, HOSTILE, "-s", ini=NO_ESCAPING, environment=environment)
    failed = [name for name, verdict in run.verdicts.items() if name.startswith("test_id")]
    assert len(failed) == 7, run.output
    for name in failed:
        assert run.verdicts[name].startswith("failure: rank 1 (no")
        assert "): RuntimeError:" in run.verdicts[name]
    assert run.verdicts["test_after"] == "passed"
    assert run.end == ("REJECTED", 1, "rank 0")
    assert run.left_over == []


FULL = {
    "test_full.py": """
        import os, time
        from pathlib import Path
        from stamps import RANK, meet, stamp

        def test_first(cluster):
            meet(cluster, "nothing")

        def test_fills_the_disk(cluster):
            if RANK == 0:
                with open(Path(os.environ["DISK"], "filler"), "wb", buffering=0) as file:
                    for _ in range(10):  # a report that is being replaced gives its old pages back a moment later
                        try:
                            while True:
                                file.write(bytes(4096))
                        except OSError:
                            stamp("full")
                            time.sleep(0.05)
            meet(cluster, "full")

        def test_next(cluster):
            meet(cluster, "next")
    """
}


def test_a_full_disk_loses_nothing_and_is_no_pass(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=256k none "$DISK" && exec "$@"'
    run = torchrun(
        tmp_path,
        FULL,
        f"--gpucluster-report-dir={disk / 'reports'}",
        f"--junitxml={disk / 'report.xml'}",
        before=["unshare", "-Urm", "sh", "-c", mount, "sh"],
        environment={"DISK": str(disk)},
    )
    assert run.stamp("after_next", 0), "the tests have gone on"
    assert run.exits == [1], run.output
    assert os.strerror(errno.ENOSPC) in run.output
    assert "BROKEN" in run.output
    [copies] = (path for path in (tmp_path / "tmp").iterdir() if (path / "report.xml").exists())
    assert f"in {copies}" in " ".join(run.output.split())  # maybe on two lines
    document = (copies / "report.xml").read_text(encoding="utf-8")
    require_junit(document)
    assert {case.get("name") for case in ET.fromstring(document).iter("testcase")} >= {
        *("test_first", "test_fills_the_disk", "test_next")
    }
    assert len(journal.read(copies / "journal.jsonl").results) == 3
    assert run.left_over == []


def test_when_everything_is_killed_at_once_the_report_names_the_running_test(tmp_path, times):
    # What a container's end does: no process of it lives on, in whatever session it is.
    run = start(
        tmp_path,
        suite("one_fault"),
        deadline=60.0,
        environment={"FAULT": "wait", "VICTIM": "1"},
        before=["unshare", "-Urp", "--fork", "--kill-child", "--mount-proc"],
    )
    stamps = [run.wait_for_stamp("fault", rank) for rank in (0, 1)]
    report = run.junit_path
    message = "the run ended here: test_one_fault.py::test_fault"
    run.wait_for("the report names the test", lambda: report.exists() and message in report.read_text())
    os.kill(run.agents[0].pid, 9)
    run.wait()
    assert run.verdicts["test_first"] == "passed"
    assert run.verdicts["test_fault"] == f"error: {message}"
    assert run.verdicts["test_next"].startswith("skipped: not run: ")
    assert run.journal.end is None
    assert run.left_over == []
    times.ended("death: everything killed", run, since=max(stamp.at for stamp in stamps), goal=DEATH)
