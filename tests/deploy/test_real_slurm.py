"""deploy/slurm in a real Slurm: two and three slurmd on this host, fake GPUs, ranks on cpu, a suite that is small.

What is run are the scripts themselves, by sbatch; `gpucluster` is the real one, behind a program of a few lines that
can take the place of a node that is ill.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from junit_files import JunitFile
from programs import require_program
from sessions import environment
from shell import finished
from slurm_cluster import GPUS_PER_NODE, HOST, NODES, PROGRAMS, SlurmCluster, cluster

from pytest_gpucluster.journal import journal
from pytest_gpucluster.reports.registry import FILES

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "deploy" / "slurm"
DEADLINE_SECONDS = 180.0
"""Generous: no job here should take a tenth of it on a host that does nothing else."""
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

# What a test does is said by the job's environment, so that a rerun may do better.
SUITE = """\
import os
import time
from pathlib import Path

import pytest

ACT = os.environ.get("ACT", "")
HERE = Path(os.environ["TEST_FOLDER"])


@pytest.mark.criterion("inventory")
def test_node(cluster, measure):
    measure("inventory.ranks", cluster.world_size, unit="ranks", record_only=True)
    assert ACT != f"bad {cluster.hostname}", "this node is bad"


def test_together(cluster):
    assert len(set(cluster.all_gather_object(cluster.hostname))) == cluster.nnodes
    if ACT == "stay":
        (HERE / f"staying-{cluster.rank}").touch()
        until = time.monotonic() + 100
        while not (HERE / "go").exists() and time.monotonic() < until:
            time.sleep(0.1)


def test_after():
    assert ACT != "fail"
"""

# A node that is gone never comes to say so; one that is old has another version.
PROGRAM = """\
#!/bin/sh
case "$ILL:$SLURMD_NODENAME" in
  "gone $SLURMD_NODENAME:"*) read -r _ _ _ task _ </proc/$PPID/stat; kill -KILL "$task" $PPID ;;
  "old $SLURMD_NODENAME:"*) [ "$1" != --version ] || {{ echo pytest-gpucluster 0.0.1; exit 0; }} ;;
esac
exec {python} -m pytest_gpucluster "$@"
"""

HEALTH = """\
#!/bin/sh
# slurmd starts this again and again, and after a job; it goes on where the test has asked for it. What does not come
# of it the first time, such as while Slurm is busy, comes from the next health check, as on any site.
[ -z "$SLURM_SCRIPT_CONTEXT" ] && flag=check || flag=$SLURM_SCRIPT_CONTEXT
[ -e "{folder}/$flag-$SLURMD_NODENAME" ] || exit 0
touch "{folder}/check-$SLURMD_NODENAME"
HEALTH_CHECK_CONF="{folder}/health-$SLURMD_NODENAME.conf" exec {script}
"""


@dataclass(kw_only=True)
class Job:
    number: str
    state: str
    code: int
    output: str
    folder: Path
    """Of its reports."""

    @property
    def verdicts(self):
        """Of the JUnit file: name -> "passed" or "error: its message"."""
        return JunitFile(self.folder / "report.xml").verdicts

    @property
    def cases(self):
        return {name: verdict.partition(":")[0] for name, verdict in self.verdicts.items()}

    @property
    def journal(self):
        return journal.read(self.folder / "latest" / "journal.jsonl")


@dataclass(kw_only=True)
class Site:
    """A Slurm that is up, with a suite in a folder that all its nodes share."""

    slurm: SlurmCluster
    folder: Path

    def environ(self, **more):
        own = {
            "SUITE_DIR": str(self.folder / "suite"),
            "SUITE_VENV": str(self.folder / "venv"),
            "GPUCLUSTER_REPORT_DIR": str(self.folder / "reports"),
            "GPUCLUSTER_DEVICE": "cpu",
            "TEST_FOLDER": str(self.folder),
        }
        return self.slurm.environment(environment({**own, **more}))

    def submit(self, script, *words, options=("--nodes=2",), **more):
        command = ["sbatch", "--parsable", "--gpus-per-node=2", f"--output={self.folder}/%A.out", *options]
        done = finished([*command, str(SLURM / script), *words], env=self.environ(**more), cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit_one_that_stays(self, nodes, *words, tests="tiny", options=()):
        """Submit a job, and wait until all its ranks stay in a test, until there is a file `go`."""
        (self.folder / "go").unlink(missing_ok=True)
        for path in self.folder.glob("staying-*"):
            path.unlink()
        number = self.submit(
            "acceptance.sbatch", "-k", tests, *words, options=(f"--nodes={nodes}", *options), ACT="stay"
        )
        ranks = nodes * GPUS_PER_NODE
        self.until(lambda: len(list(self.folder.glob("staying-*"))) == ranks, "the test that stays")
        return number

    def ended(self, number, kind="slurm"):
        def shown():
            text = self.slurm.ask("scontrol", "--oneliner", "show", "job", number)
            return dict(re.findall(r"(\w+)=(\S*)", text))

        self.until(lambda: shown()["JobState"] in _ENDED, f"the end of job {number}")
        told = shown()
        output = Path(told["StdOut"])
        return Job(
            number=number,
            state=told["JobState"],
            code=int(told["ExitCode"].partition(":")[0]),
            output=output.read_text() if output.exists() else "",
            folder=self.folder / "reports" / f"{kind}-{number}",
        )

    def run(self, script, *words, kind="slurm", **more):
        return self.ended(self.submit(script, *words, **more), kind)

    def node(self, name):
        """Return a node's state and reason, as Slurm says them; but for who is being pinged at this moment."""
        text = self.slurm.ask("scontrol", "--oneliner", "show", "node", name)
        state, reason = re.search(r" State=(\S+)", text), re.search(r" Reason=(.*?)(?: \[|$)", text)
        return state[1].replace("+NOT_RESPONDING", ""), reason[1] if reason else ""

    def until(self, found, what):
        until = time.monotonic() + DEADLINE_SECONDS
        while not found():
            if time.monotonic() > until:
                said = [*self.folder.glob("*.out"), *self.folder.glob("state-*/log")]
                outputs = "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in said)
                raise AssertionError(f"waited in vain for {what}\n{outputs}\n{self.slurm.logs()}")
            time.sleep(0.1)


@contextlib.contextmanager
def a_site():
    for program in PROGRAMS:
        require_program(program)
    # Not below pytest's own folder: the paths of slurmd's sockets would be too long.
    with tempfile.TemporaryDirectory(prefix="gpucluster-slurm-") as name:
        folder = Path(name)
        (folder / "suite" / "acceptance").mkdir(parents=True)
        (folder / "suite" / "deploy").symlink_to(ROOT / "deploy")
        (folder / "suite" / "pytest.ini").write_text("[pytest]\ngpucluster = true\naddopts = -p no:hypothesispytest\n")
        (folder / "suite" / "acceptance" / "test_tiny.py").write_text(SUITE)
        for name in ("conftest.py", "test_scheduler.py"):
            (folder / "suite" / "acceptance" / name).symlink_to(ROOT / "acceptance" / name)
        for path, text in {
            "venv/bin/gpucluster": PROGRAM.format(python=sys.executable),
            "health.sh": HEALTH.format(folder=folder, script=SLURM / "health-check.sh"),
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
            (folder / path).chmod(0o755)
        with cluster(folder / "slurm") as slurm:
            yield Site(slurm=slurm, folder=folder)


@pytest.fixture(scope="module")
def site():
    with a_site() as found:
        yield found


@pytest.fixture
def own_site():
    """For a test that loses a node: after that Slurm 22.05 was seen to pass the node over for later jobs."""
    with a_site() as found:
        yield found


@pytest.fixture(autouse=True)
def in_service(site):
    """What one test has drained is no trouble of the next one."""
    yield
    drained = [node for node in NODES if "DRAIN" in site.node(node)[0]]
    if drained:
        site.slurm.ask("scontrol", "update", f"NodeName={','.join(drained)}", "State=UNDRAIN")


@pytest.mark.smoke
def test_a_job_on_two_nodes_passes_and_leaves_all_reports(site):
    job = site.run("acceptance.sbatch")
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert job.cases == {
        **dict.fromkeys(("test_node", "test_together", "test_after", "test_slurm_allocation"), "passed"),
        **dict.fromkeys(("test_slurm[before]", "test_slurm[after]"), "passed"),
        "test_kubernetes": "skipped",
    }
    assert (job.journal.run.nnodes, job.journal.run.world_size) == (2, 4)
    assert job.journal.end.by == "rank 0"
    assert {path.name for path in (job.folder / "rendered").iterdir()} >= set(FILES.values())
    assert json.loads((job.folder / "answer.json").read_text())["verdict"] == "REHEARSED"
    assert sorted(path.name for path in (job.folder / "nodes").iterdir()) == sorted(NODES[:2])
    [slurm] = [each for each in job.journal.results if each.nodeid.endswith("::test_slurm[before]")]
    assert [one.value for one in slurm.measurements if one.metric == "slurm.nodes"] == [2]
    assert f"exit code 0; reports: {job.folder}" in job.output.splitlines()[-1]


def test_a_failure_is_the_job_s_exit_code_and_what_failed_runs_again(site):
    failed = site.run("acceptance.sbatch", "-k", "tiny", ACT="fail")
    assert (failed.state, failed.code) == ("FAILED", 1), failed.output
    assert failed.cases == {"test_node": "passed", "test_together": "passed", "test_after": "failure"}
    again = site.run("rerun.sbatch", failed.number, "--lf")
    assert (again.state, again.code) == ("COMPLETED", 0), again.output
    assert again.cases == {"test_after": "passed"}
    merged = journal.read(again.folder / "merged" / "journal.jsonl")
    assert [each.outcome for each in merged.results] == ["passed"] * 3
    assert failed.cases["test_after"] == "failure"
    selected = site.run("rerun.sbatch", str(again.folder), "-k", "node", options=("--nodes=1",))
    assert (selected.code, selected.cases) == (0, {"test_node": "passed"}), selected.output
    assert not (selected.folder / "merged").exists()  # of one node and of two


def test_a_node_that_is_lost_is_named_with_its_rank(own_site):
    lost = NODES[1]
    number = own_site.submit_one_that_stays(3, "--gpucluster-timeouts=dead=5")
    own_site.slurm.ask("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    job = own_site.ended(number)
    assert (job.state, job.code) == ("FAILED", 11), job.output
    assert (job.journal.exit, job.journal.run.nnodes) == (11, 3)
    assert job.journal.end is not None, job.output
    assert job.journal.end.by == "rank 0"
    [together] = [each for each in job.journal.results if each.nodeid.endswith("::test_together")]
    assert together.outcome == "error"
    # Ranks 2 and 3 are gone together; who is looked at first is named.
    assert together.culprits, together
    assert set(together.culprits) <= {2, 3}
    named = f"rank {together.culprits[0]} ({lost})"
    told = json.loads((job.folder / "answer.json").read_text())
    assert (told["verdict"], told["exit"], told["ended"]) == ("BROKEN", 11, True)
    assert named in told["reason"]
    assert named in job.verdicts["test_together"]
    cases = {"test_node": "passed", "test_together": "error", "test_after": "skipped"}
    assert {name: job.cases[name] for name in cases} == cases
    assert (job.folder / "rendered" / "report.html").exists()


def test_a_node_whose_slurmd_has_died_is_named_though_its_ranks_live(own_site):
    own_site.slurm.configure("SlurmdTimeout=10")
    number = own_site.submit_one_that_stays(2, tests="tiny or test_slurm")
    own_site.slurm.daemons[f"slurmd-{NODES[1]}"].kill()
    own_site.until(lambda: own_site.node(NODES[1])[0].startswith("DOWN"), "that Slurm misses the node")
    (own_site.folder / "go").touch()
    job = own_site.ended(number)
    assert job.code == 11, job.output
    assert {job.cases[name] for name in ("test_together", "test_after", "test_slurm[before]")} == {"passed"}
    verdict = job.verdicts["test_slurm[after]"]
    assert (verdict.startswith("error: "), f"slurm.node: {NODES[1]}" in verdict) == (True, True)


def test_a_job_at_its_time_limit_ends_in_order(site):
    # Slurm may signal up to a minute earlier than it was asked to. Source: sbatch(1), --signal.
    number = site.submit_one_that_stays(2, options=("--time=4",))
    job = site.ended(number)
    assert (job.state, job.code, job.journal.exit) == ("FAILED", 2, 2), job.output
    assert "SIGTERM" in job.journal.reason
    assert (job.cases["test_node"], job.cases["test_after"]) == ("passed", "skipped")
    assert (job.folder / "rendered" / "report.html").exists()


def test_a_job_that_is_requeued_says_that_it_is_another_attempt(site):
    number = site.submit_one_that_stays(2, options=("--requeue",))
    site.slurm.ask("scontrol", "requeue", number)
    site.until(lambda: "PENDING" in site.slurm.ask("scontrol", "show", "job", number), "the requeued job")
    (site.folder / "go").touch()
    site.slurm.ask("scontrol", "update", f"JobId={number}", "StartTime=now")
    job = site.ended(number)
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    first, second = (
        journal.read(job.folder.with_name(job.folder.name + end) / "latest" / "journal.jsonl")
        for end in ("", "-restart1")
    )
    assert (first.run.run_id, second.run.run_id) == (f"slurm-{number}-0", f"slurm-{number}-1")
    assert first.exit != 0
    assert second.exit == 0


def test_a_job_that_is_cancelled_leaves_its_reports_and_is_no_pass(site):
    number = site.submit_one_that_stays(2)
    site.slurm.ask("scancel", number)
    job = site.ended(number)
    # The script may be killed before its end: 0:15 or 0:9.
    assert job.code in (0, 2, 11), job.output
    assert job.state == "CANCELLED"
    site.until(lambda: job.journal.end is not None, "the end of the journal")
    assert job.journal.exit in (2, 11)
    assert job.cases["test_node"] == "passed"
    assert job.cases["test_together"] in ("error", "skipped")
    assert "passed" not in (job.cases["test_together"], job.cases["test_after"])


def test_nothing_is_run_where_a_node_does_not_answer_or_is_another_version(site):
    gone = site.run("acceptance.sbatch", ILL=f"gone {NODES[1]}")
    assert (gone.state, gone.code) == ("FAILED", 11)
    assert f"no answer from {NODES[1]}: " in gone.output
    old = site.run("acceptance.sbatch", ILL=f"old {NODES[1]}")
    assert old.code == 11
    assert f"nodes/{NODES[1]}:pytest-gpucluster 0.0.1" in old.output
    assert not (gone.folder / "latest").exists()
    assert not (old.folder / "latest").exists()


def test_every_node_has_its_own_element_of_the_array(site):
    words = ["--gpus-per-node=2", f"--output={site.folder}/%A_%a.out", "--", "-k", "test_node"]
    done = finished(
        ["bash", str(SLURM / "array-nodes.sbatch"), ",".join(NODES), *words], env=site.environ(ACT=f"bad {NODES[1]}")
    )
    assert done.returncode == 0, done.stderr
    number = re.findall(r"job (\d+): 3 nodes", done.stdout)[0]
    jobs = [site.ended(f"{number}_{element}") for element in range(3)]
    assert [job.code for job in jobs] == [0, 1, 0], jobs[0].output
    folder = site.folder / "reports" / f"array-{number}"
    ran = {path.name: journal.read(path / "latest" / "journal.jsonl").run for path in folder.iterdir()}
    assert {name: (run.hostname, run.world_size) for name, run in ran.items()} == {name: (name, 2) for name in NODES}
    [fleet] = re.findall(r"when it is over: (.*)", done.stdout)
    told = finished(["bash", "-c", fleet], env=site.environ())
    assert told.returncode == 1
    assert "3 nodes: 2 good, 1 " in told.stdout.replace("\n", " ")


def test_all_nodes_tell_what_they_are_and_who_does_not_is_named(site):
    job = site.run("discover.sbatch", kind="discover", options=("--nodes=3",))
    assert (job.code, job.state) == (0, "COMPLETED"), job.output
    assert "3 nodes" in job.output
    assert {path.name for path in (job.folder / "nodes").iterdir()} == {f"{node}.json" for node in NODES}
    gone = site.run("discover.sbatch", kind="discover", options=("--nodes=3",), ILL=f"gone {NODES[2]}")
    assert (gone.code, gone.state) == (5, "FAILED"), gone.output
    assert f"{NODES[2]}: no answer" in (gone.folder / "differences.txt").read_text()


def test_a_health_check_drains_a_bad_node_and_gives_a_good_one_back(site):
    check = "acceptance/test_tiny.py -k test_node"
    for node, act, flag in ((NODES[1], "", "check"), (NODES[2], f"bad {NODES[2]}", "epilog_slurmd")):
        (site.folder / f"health-{node}.conf").write_text(
            f"PATH={os.environ['PATH']}\nSUITE_DIR={site.folder}/suite SUITE_VENV={site.folder}/venv NODE={node}\n"
            f"STATE_DIR={site.folder}/state-{node} GPUS=1 REHEARSE=yes DEADLINE=100 CHECK=({check})\n"
            f"export SLURM_CONF={site.slurm.conf} GPUCLUSTER_HOSTNAME={node} ACT='{act}' TEST_FOLDER=/tmp\n"
            "export GPUCLUSTER_DEVICE=cpu OMP_NUM_THREADS=1\n"
        )
        (site.folder / f"{flag}-{node}").touch()
    program = site.folder / "health.sh"
    try:
        site.slurm.configure(f"HealthCheckProgram={program}", "HealthCheckInterval=2", f"Epilog={program}")
        site.slurm.ask("srun", f"--nodelist={NODES[2]}", "--gpus-per-node=2", "true")
        for node in NODES[1:]:
            site.until((site.folder / f"state-{node}" / "next").exists, f"the end of the check of {node}")
    finally:
        site.slurm.configure()
    logs = [(site.folder / f"state-{node}" / "log").read_text() for node in NODES[1:]]
    state, reason = site.node(NODES[2])
    assert state == "IDLE+DRAIN", logs
    assert reason.startswith("gpucluster health check: REHEARSAL, REJECTED, exit code 1: acceptance/test_tiny.py")
    assert site.node(NODES[1])[0] == "IDLE", logs
    assert "exit code 0: REHEARSAL, REHEARSED" in logs[0]


def test_the_hook_drains_who_was_isolated(site):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import types, drain_slurm_nodes as hook\n"
        "hook.pytest_gpucluster_verdict(types.SimpleNamespace(verdict=sys.argv[2], kind='', job_id='4711',"
        " excluded=sys.argv[3:], directory='/reports/x'))"
    )
    for verdict, nodes, state in (("BROKEN", NODES[1:], "IDLE"), ("REJECTED", NODES[1:], "IDLE+DRAIN")):
        command = [sys.executable, "-c", script, str(ROOT / "deploy" / "hooks"), verdict, *nodes]
        done = finished(command, env=site.environ())
        assert done.returncode == 0, done.stderr
        assert {site.node(node)[0] for node in nodes} == {state}
    assert all(part in site.node(NODES[1])[1] for part in ("pytest-gpucluster job 4711: ", "/reports/x"))
    assert site.node(HOST) == ("IDLE", "")


def test_a_sweep_leaves_out_the_bad_node(site):
    sweep = [sys.executable, "-m", "pytest_gpucluster", "sweep", "slurm", "--expect=1", "--report-dir=sweep"]
    allocation = ["salloc", "--nodes=3", "--gpus-per-node=2", "--exclusive", "--no-kill"]
    done = finished(
        [*allocation, *sweep, "--", "acceptance/", "-k", "tiny"],
        env=site.environ(ACT=f"bad {NODES[2]}"),
        cwd=site.folder / "suite",
        seconds=DEADLINE_SECONDS,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    kept = json.loads((site.folder / "suite" / "sweep" / "latest" / "sweep.json").read_text())
    verdicts = {each["node"]: each["verdict"] for each in kept["alone"]}
    assert verdicts == {NODES[0]: "REHEARSED", NODES[1]: "REHEARSED", NODES[2]: "REJECTED"}, done.stdout
    assert kept["together"]["verdict"] == "REHEARSED", kept["together"]
    assert journal.read(Path(kept["together"]["journal"])).run.nnodes == 2
