"""deploy/slurm with programs in place of Slurm's: what no Slurm on one host can be made to do, and wrong use.

The scripts are the real ones. srun runs each node's task here, one after the other; `gpucluster run` leaves the journal
that a test asks for, and all else that is asked of `gpucluster` the real one does.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from sessions import environment

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "deploy" / "slurm"

_SRUN = """\
#!/bin/bash
printf '%s\\n' "$*" >>"$FAKES/srun.log"
nodes=($FAKE_NODES) words=()
while [[ $1 == -* ]]; do words+=("$1"); [[ $1 != --nodelist=* ]] || nodes=("${1#*=}"); shift; done
if [[ -n $FAKE_TOLD && ${words[*]} == *gpucluster-suite* ]]; then
  read -r _ _ _ script _ </proc/$PPID/stat
  kill -TERM "$script"
  sleep 1
fi
worst=0 id=0
for node in "${nodes[@]}"; do
  code=0
  [[ " $FAKE_GONE " == *" $node "* ]] ||
    SLURMD_NODENAME=$node SLURM_NODEID=$id SLURM_STEP_NUM_NODES=${#nodes[@]} "$@" || code=$?
  ((code <= worst)) || worst=$code
  id=$((id + 1))
done
exit "$worst"
"""
_SCONTROL = """\
#!/bin/bash
printf '%s\\n' "$*" >>"$FAKES/scontrol.log"
case "$*" in
  "show hostnames "*) printf '%s\\n' $FAKE_NODES ;;
  *update*State=DRAIN*) echo "IDLE+DRAIN" >"$FAKES/state"; all="$*"; echo "${all#*Reason=}" >"$FAKES/reason" ;;
  *update*State=UNDRAIN*) echo "IDLE" >"$FAKES/state"; : >"$FAKES/reason" ;;
  *"show job "*) echo "JobId=4711 BatchHost=n1 NumNodes=${FAKE_LEFT:-2} NumCPUs=8 NumTasks=2" ;;
  *"show node nowhere"*) exit 1 ;;
  *"show node"*) [[ $(<"$FAKES/reason") != *"${FAKE_SILENT:-nothing}"* ]] || exit 1 ;;&
  *"show node"*) echo "NodeName=n1 NodeAddr=10.9.8.7 State=$(cat "$FAKES/state") X=y Reason=$(cat "$FAKES/reason")" ;;
esac
"""
_GPUCLUSTER = """\
#!/bin/bash
case $1 in
  --version) echo "pytest-gpucluster 0.1.0" ;;
  verdict) [[ -z $FAKE_CRASH ]] || { echo "ModuleNotFoundError: No module named 'pytest_gpucluster'" >&2; exit 1; } ;;&
  run)
    printf '%s\\n' "$*" >>"$FAKES/run.log"
    for word in "$@"; do
      [[ $word != --gpucluster-report-dir=* ]] || folder=${word#*=}
    done
    if [[ $SLURM_NODEID -eq 0 && -n $FAKE_JOURNAL ]]; then
      mkdir "$folder/run1" && ln -s run1 "$folder/latest"
      printf '%s\\n' "$FAKE_JOURNAL" >"$folder/run1/journal.jsonl"
    fi
    [[ -z $FAKE_SLEEP ]] || exec sleep "$FAKE_SLEEP"
    codes=($FAKE_EXITS)
    exit "${codes[${SLURM_NODEID:-0}]}"
    ;;
  *) exec PYTHON -m pytest_gpucluster "$@" ;;
esac
"""
_ENROOT = """\
#!/bin/bash
[[ $1 == list ]] && echo pyxis_gpucluster-4711 || printf '%s %s\\n' "$SLURMD_NODENAME" "$*" >>"$FAKES/enroot.log"
"""
_SCANCEL = """\
#!/bin/bash
printf '%s\\n' "$*" >>"$FAKES/scancel.log"
exit 1
"""
_NVIDIA_SMI = """\
#!/bin/bash
for ((gpu = 0; gpu < FAKE_GPUS; gpu++)); do echo "GPU $gpu: NVIDIA H100 80GB HBM3 (UUID: GPU-$gpu)"; done
"""
RUN = {"type": "run", "schema_version": 1, "run_id": "r", "started_at": "x", "nnodes": 2, "world_size": 16}


def a_journal(verdict: str | None, code: int = 0, **more: object) -> str:
    lines = [{**RUN, **more}]
    if verdict is not None:
        lines.append({"type": "end", "verdict": verdict, "exit": code, "reason": "so"})
    return "\n".join(json.dumps(line) for line in lines)


class Fakes:
    """A folder with programs, and what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").write_text("IDLE")
        (folder / "reason").write_text("")
        self.suite = folder / "a suite"
        (self.suite / "acceptance").mkdir(parents=True)
        (self.suite / "deploy").symlink_to(ROOT / "deploy")
        self.venv, self.reports = folder / "a venv", folder / "all reports"
        gpucluster = _GPUCLUSTER.replace("PYTHON", shlex.quote(sys.executable))
        programs = {
            "srun": _SRUN,
            "scontrol": _SCONTROL,
            "scancel": _SCANCEL,
            "enroot": _ENROOT,
            "nvidia-smi": _NVIDIA_SMI,
        }
        for path, text in {
            **{folder / "bin" / name: text for name, text in programs.items()},
            self.venv / "bin" / "gpucluster": gpucluster,
        }.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    def log(self, name: str) -> list[str]:
        path = self.folder / f"{name}.log"
        return path.read_text().splitlines() if path.exists() else []

    def start(
        self, script: str, *words: str, environ: Mapping[str, str | None] | None = None
    ) -> subprocess.CompletedProcess[str]:
        job = {"ID": "4711", "NODELIST": "n[1-2]", "NUM_NODES": "2"}
        own: dict[str, str | None] = {
            **{f"SLURM_JOB_{name}": value for name, value in job.items()},
            "SLURMD_NODENAME": "n1",
            "SLURM_GPUS_ON_NODE": "8",
            "HEAD_ADDRESS": "n1",
            "SUITE_DIR": str(self.suite),
            "SUITE_VENV": str(self.venv),
            "GPUCLUSTER_REPORT_DIR": str(self.reports),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "FAKES": str(self.folder),
            "FAKE_NODES": "n1 n2",
            "FAKE_JOURNAL": a_journal("ACCEPTED"),
            "FAKE_EXITS": "0 0",
            "FAKE_SLEEP": "",
            "FAKE_CRASH": "",
            "FAKE_TOLD": "",
            "FAKE_GONE": "",
            "CONTAINER_IMAGE": "",
            "CONTAINER_MOUNTS": "",
            **(environ or {}),
        }
        return subprocess.run(
            ["bash", str(SLURM / script), *words],
            env=environment({name: value for name, value in own.items() if value is not None}),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


@pytest.mark.parametrize(
    ("says", "exits", "code"),
    [
        (a_journal("ACCEPTED"), "0 0", 0),
        (a_journal("ACCEPTED"), "0 11", 11),
        (a_journal("ACCEPTED"), "0 137", 11),
        (a_journal("REJECTED", 1), "1 11", 1),
        (a_journal("INCOMPLETE", 10), "10 10", 10),
        (a_journal(None), "137 11", 11),
        ("", "4 4", 4),
        ("", "1 1", 11),
        ("", "0 0", 11),
    ],
    ids=[
        "pass",
        "a node breaks",
        "a node is killed",
        "rejected",
        "incomplete",
        "cut off",
        "usage",
        "no word",
        "nothing",
    ],
)
def test_the_job_ends_with_the_verdict_and_never_better(fakes: Fakes, says: str, exits: str, code: int) -> None:
    done = fakes.start("acceptance.sbatch", environ={"FAKE_JOURNAL": says, "FAKE_EXITS": exits})
    assert done.returncode == code, done.stdout + done.stderr
    assert f"exit code {code}; reports: {fakes.reports}/slurm-4711" in done.stdout
    assert (fakes.reports / "slurm-4711" / "rendered" / "report.html").exists() == bool(says)


def test_a_suite_that_cannot_tell_its_verdict_has_rejected_nobody(fakes: Fakes) -> None:
    done = fakes.start("acceptance.sbatch", environ={"FAKE_CRASH": "yes"})
    assert (done.returncode, "ended with 1 and left no answer.json" in done.stderr) == (11, True), done.stderr


@pytest.mark.parametrize(
    ("array", "told"), [({}, "4711"), ({"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}, "4711_3")]
)
def test_who_is_told_to_end_ends_its_own_ranks_alone(fakes: Fakes, array: dict[str, str], told: str) -> None:
    done = fakes.start("acceptance.sbatch", environ={"FAKE_TOLD": "yes", **array})
    assert "told to end, by the time limit or scancel" in done.stdout
    assert fakes.log("scancel") == [f"--signal=URG {told}"]


def test_each_node_is_told_its_number_and_where_all_meet(fakes: Fakes) -> None:
    words = ["-k", "hbm or nccl", "--gpucluster-profile=quick"]
    done = fakes.start("acceptance.sbatch", *words, environ={"GPUCLUSTER_HOSTNAME": "not everybody's", "RANK": "3"})
    assert done.returncode == 0, done.stderr
    folder = fakes.reports / "slurm-4711"
    port = 20000 + 16 * 4711 % 10000
    assert fakes.log("run") == [
        f"run --nnodes=2 --node-rank={rank} --nproc-per-node=8 --master-addr=n1 --master-port={port} -- acceptance/ "
        f"{' '.join(words)} --gpucluster-report-dir={folder} --junitxml={folder}/report.xml"
        f" -o cache_dir={folder}/pytest-cache"
        for rank in (0, 1)
    ]
    steps = [line for line in fakes.log("srun") if line.startswith("--")]
    assert len(steps) == 2
    for line in steps:
        assert line.startswith("--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0")
        assert " --no-kill --export=ALL --mpi=none " in line
        assert "--container" not in line


def test_a_head_that_nobody_can_look_up_is_met_at_the_address_that_slurm_uses(fakes: Fakes) -> None:
    done = fakes.start("acceptance.sbatch", environ={"HEAD_ADDRESS": None, "FAKE_NODES": "no-such-host.invalid n2"})
    assert done.returncode == 0, done.stderr
    assert all("--master-addr=10.9.8.7 " in line for line in fakes.log("run"))


def test_a_container_is_asked_for_in_every_step_where_there_is_an_image(fakes: Fakes) -> None:
    inside = fakes.folder / "bin" / "gpucluster"
    inside.symlink_to(fakes.venv / "bin" / "gpucluster")
    reports = fakes.folder / "reports"
    image = {"CONTAINER_IMAGE": "registry.example#gpucluster-acceptance:0.1.0", "CONTAINER_MOUNTS": "/data:/data:ro"}
    done = fakes.start(
        "acceptance.sbatch", environ={**image, "SUITE_VENV": "/none", "GPUCLUSTER_REPORT_DIR": str(reports)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = [line for line in fakes.log("srun") if line.startswith("--")]
    assert len(lines) == 4  # who is there, the suite, its verdict, its reports
    assert "--container" not in last
    assert fakes.log("enroot") == [f"{node} remove --force pyxis_gpucluster-4711" for node in ("n1", "n2")]
    for line in lines:
        assert f"--container-image={image['CONTAINER_IMAGE']} --container-name=gpucluster-4711 " in line
        assert f"--container-mounts={reports}/slurm-4711:{reports}/slurm-4711,/data:/data:ro " in line
        assert "--container-workdir=/opt/pytest-gpucluster" in line
        assert " --export=ALL --mpi=none " in line
    refused = fakes.start("acceptance.sbatch", environ={**image, "GPUCLUSTER_REPORT_DIR": f"{fakes.folder}/a,b"})
    assert (refused.returncode, "no comma and no colon" in refused.stderr) == (2, True)


def test_a_job_that_has_lost_a_node_starts_no_suite_and_tidies_up_on_those_that_are_left(fakes: Fakes) -> None:
    (fakes.folder / "bin" / "gpucluster").symlink_to(fakes.venv / "bin" / "gpucluster")
    image = {"CONTAINER_IMAGE": "image", "GPUCLUSTER_REPORT_DIR": str(fakes.folder / "reports")}
    done = fakes.start("acceptance.sbatch", environ={**image, "FAKE_LEFT": "1"})
    assert done.returncode == 11, done.stdout + done.stderr
    assert "a node of n[1-2] was lost before the suite could start" in done.stderr
    assert fakes.log("run") == []
    ready, tidy = [line for line in fakes.log("srun") if line.startswith("--")]
    # The last one counts: srun would wait for a second node until the time limit.
    assert ["--nodes=1" in line.split() for line in (ready, tidy)] == [False, True]
    assert tidy.index("--nodes=1 --ntasks=1") > tidy.index("--nodes=2")


@pytest.mark.parametrize(
    ("words", "environ", "code", "said"),
    [
        ([], {"SLURM_JOB_ID": None}, 2, "no job of Slurm: start this script with sbatch"),
        ([], {"SUITE_DIR": "/nowhere"}, 2, "no /nowhere/deploy/slurm/job.sh here: submit from the top"),
        ([], {"SUITE_VENV": "/nowhere"}, 2, "/nowhere/bin/gpucluster cannot be run on n1: install the suite"),
        ([], {"SLURM_GPUS_ON_NODE": None}, 2, "Slurm gave this job no GPUs"),
        (["--junitxml=x.xml"], {}, 2, "--junitxml=x.xml: this job chooses the place of its reports"),
        (["--gpucluster-report-dir", "x"], {}, 2, "export GPUCLUSTER_REPORT_DIR instead"),
        ([], {"GPUCLUSTER_REPORT_DIR": "/dev/null/x"}, 11, "/dev/null/x cannot be made"),
        ([], {"FAKE_GONE": "n2"}, 11, "no answer from n2: the node is gone, does not see"),
    ],
    ids=["no job", "no checkout", "no venv", "no GPUs", "junit", "reports", "read only", "a node is gone"],
)
def test_what_is_missing_is_named_before_anything_runs(
    fakes: Fakes, words: list[str], environ: dict[str, str | None], code: int, said: str
) -> None:
    done = fakes.start("acceptance.sbatch", *words, environ=environ)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert f"BROKEN, exit code {code}: " in done.stderr
    assert fakes.log("run") == []


@pytest.mark.parametrize("words", [["--gpucluster-device=cpu"], ["--gpucluster-device", "cpu"]])
def test_a_rehearsal_needs_no_gpus(fakes: Fakes, words: list[str]) -> None:
    assert fakes.start("acceptance.sbatch", *words, environ={"SLURM_GPUS_ON_NODE": None}).returncode == 0
    assert all("--nproc-per-node" not in line for line in fakes.log("run"))


def test_reports_are_never_overwritten(fakes: Fakes) -> None:
    assert fakes.start("acceptance.sbatch").returncode == 0
    again = fakes.start("acceptance.sbatch")
    assert (again.returncode, "is there already" in again.stderr) == (11, True)
    assert fakes.start("acceptance.sbatch", environ={"SLURM_RESTART_COUNT": "1"}).returncode == 0
    assert (fakes.reports / "slurm-4711-restart1" / "latest").exists()


def test_a_node_that_does_not_see_the_folder_says_so(fakes: Fakes) -> None:
    script = (
        f"source {shlex.quote(str(SLURM / 'job.sh'))}; node_is_ready /nowhere/slurm-1 true; node_tells /nowhere true"
    )
    done = subprocess.run(
        ["bash", "-c", script], env={"SLURMD_NODENAME": "n9"}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "n9 does not see /nowhere/slurm-1: it must be on a file system that all nodes share" in done.stderr
    assert "n9 does not see /nowhere:" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name the earlier job first"),
        (["--lf"], "name the earlier job first"),
        (["4710"], "say what is to run again"),
        (["1", "--lf"], "slurm-1 holds no run"),
        (["4710", "--lf"], "has no list of failures"),
    ],
)
def test_a_rerun_of_nothing_is_refused(fakes: Fakes, words: list[str], said: str) -> None:
    assert fakes.start("acceptance.sbatch", environ={"SLURM_JOB_ID": "4710"}).returncode == 0
    (fakes.folder / "run.log").unlink()
    done = fakes.start("rerun.sbatch", *words)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert fakes.log("run") == []


@pytest.mark.parametrize(
    ("words", "environ", "code", "said"),
    [
        ([], {"SLURM_JOB_ID": None}, 2, "name the nodes"),
        (["nowhere"], {"SLURM_JOB_ID": None, "FAKE_NODES": "nowhere"}, 2, "nowhere is no node of this cluster"),
        ([], {}, 2, "start this script with bash, not with sbatch"),
        (
            [],
            {"SLURM_ARRAY_TASK_ID": "1", "GPUCLUSTER_ARRAY_NODES": "n1 n2", "SLURM_JOB_NODELIST": "n1"},
            11,
            "this element is for n2 and runs on n1",
        ),
        ([], {"SLURM_ARRAY_TASK_ID": "5", "GPUCLUSTER_ARRAY_NODES": "n1 n2"}, 2, "nobody says which node"),
    ],
    ids=["no nodes", "no such node", "by sbatch", "another node", "no such element"],
)
def test_an_array_element_runs_on_its_own_node_or_not_at_all(
    fakes: Fakes, words: list[str], environ: dict[str, str | None], code: int, said: str
) -> None:
    (fakes.folder / "bin" / "sbatch").symlink_to("/bin/false")
    done = fakes.start("array-nodes.sbatch", *words, environ=environ)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert fakes.log("run") == []


def test_what_an_array_is_told_to_expect_is_one_node() -> None:
    """An element is one node: with the whole cluster's figure every one of them would be refused."""
    text = (SLURM / "array-nodes.sbatch").read_text(encoding="utf-8")
    assert [line.split()[2] for line in text.splitlines() if line.startswith("# export GPUCLUSTER_EXPECT=")] == [
        "GPUCLUSTER_EXPECT=1x8xH100"
    ]


CONF = """\
PATH={path} SUITE_DIR={suite} SUITE_VENV={venv} STATE_DIR={state} NODE=n1 EMPTY_WITHIN=0 CHECK=(acceptance/)
export FAKES={fakes} {more}
"""


def check(fakes: Fakes, how: str = "now", **more: str) -> subprocess.CompletedProcess[str]:
    """Run a health check by hand, with what the fake suite then does."""
    said = {"FAKE_JOURNAL": a_journal("ACCEPTED"), "FAKE_EXITS": "0", "FAKE_SLEEP": "", "DRAIN_ON": "rejected"}
    said |= {"FAKE_CRASH": "", "FAKE_SILENT": "", "FAKE_GPUS": "8", **more}
    quoted = {
        name: shlex.quote(str(value))
        for name, value in {
            "path": f"{fakes.folder / 'bin'}:{os.environ['PATH']}",
            "suite": fakes.suite,
            "venv": fakes.venv,
            "state": fakes.folder / "its state",
            "fakes": fakes.folder,
        }.items()
    }
    conf = fakes.folder / "health.conf"
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in said.items())
    conf.write_text(CONF.format(**quoted, more=words))
    return subprocess.run(
        ["bash", str(SLURM / "health-check.sh"), *([how] if how else [])],
        # As slurmd starts it: with next to nothing in its environment, not even a PATH.
        env={"HEALTH_CHECK_CONF": str(conf), "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def node(fakes: Fakes) -> tuple[str, str]:
    return (fakes.folder / "state").read_text().strip(), (fakes.folder / "reason").read_text().strip()


OURS = "gpucluster health check: "


@pytest.mark.parametrize(
    ("more", "code", "state", "told"),
    [
        ({}, 0, "IDLE", "exit code 0: ACCEPTED"),
        ({"FAKE_JOURNAL": a_journal("REJECTED", 1), "FAKE_EXITS": "1"}, 1, "IDLE+DRAIN", "REJECTED, exit code 1: so"),
        ({"FAKE_JOURNAL": a_journal("BROKEN", 11), "FAKE_EXITS": "11"}, 11, "IDLE", "no answer"),
        ({"FAKE_JOURNAL": "", "FAKE_EXITS": "1"}, 11, "IDLE", "no answer"),
        ({"FAKE_JOURNAL": "", "FAKE_EXITS": "1", "DRAIN_ON": "anything"}, 11, "IDLE+DRAIN", "no verdict"),
        ({"FAKE_JOURNAL": a_journal("INCOMPLETE", 10), "FAKE_EXITS": "10"}, 10, "IDLE", "no answer"),
        ({"FAKE_JOURNAL": a_journal("REHEARSED", rehearsal=True)}, 11, "IDLE", "a rehearsal on cpu says nothing"),
        ({"FAKE_SLEEP": "50", "DEADLINE": "1"}, 11, "IDLE", "not over after 1 s"),
        ({"SUITE_VENV": "/nowhere"}, 11, "IDLE", "no answer"),
        ({"FAKE_CRASH": "yes"}, 11, "IDLE", "no verdict, gpucluster ended with 1: ModuleNotFoundError"),
        ({"FAKE_GPUS": "7"}, 1, "IDLE+DRAIN", "REJECTED, exit code 1: nvidia-smi lists 7 of 8 GPUs"),
    ],
    ids=[
        "well",
        "bad",
        "broken",
        "no word",
        "asked to",
        "incomplete",
        "rehearsal",
        "deadline",
        "no venv",
        "half a venv",
        "a GPU is gone",
    ],
)
def test_only_a_rejected_node_stays_drained(
    fakes: Fakes, more: dict[str, str], code: int, state: str, told: str
) -> None:
    done = check(fakes, **more)
    assert done.returncode == code, done.stdout + done.stderr
    assert node(fakes)[0] == state
    assert told in done.stdout
    if state == "IDLE+DRAIN":
        assert node(fakes)[1].startswith(OURS)
        assert "\n" not in node(fakes)[1]
        assert told.removeprefix("exit") in node(fakes)[1]
    # Whatever was run, it was run while no job could come.
    updates = [line for line in fakes.log("scontrol") if line.startswith("update")]
    assert "State=DRAIN" in updates[0]
    assert f"Reason={OURS}running since" in updates[0]


PAGE = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
SHELL = "\n".join(path.read_text(encoding="utf-8") for path in sorted(SLURM.iterdir()) if path.suffix != ".md")


def rows(title: str) -> list[str]:
    """Return the first cell of each row of the table below a title."""
    lines = PAGE[PAGE.index(f"## {title}") :].splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| ---"))
    table = lines[begin + 1 :]
    end = next((number for number, line in enumerate(table) if not line.startswith("|")), len(table))
    return [line.split(" | ")[0].strip("| ") for line in table[:end]]


def test_the_messages_of_the_page_are_those_of_the_scripts() -> None:
    told = [row.strip("`") for row in rows("What may go wrong") if not row.startswith("`torchrun failed")]
    assert len(told) > 5
    pieces = [piece.strip() for message in told for piece in message.split("…") if piece.strip()]
    assert [piece for piece in pieces if piece not in SHELL] == []


def test_the_variables_of_the_page_are_those_of_the_scripts() -> None:
    names = [name.strip("`, ") for row in rows("Before the first job") for name in row.split(",")]
    assert len(names) > 8
    assert [name for name in names if name not in SHELL] == []


def test_the_page_and_the_script_ask_slurm_for_the_same_and_not_of_all_nodes_at_once() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("HealthCheck")]
    script = (SLURM / "health-check.sh").read_text(encoding="utf-8")
    assert [line.partition("=")[0] for line in lines] == [
        "HealthCheckProgram",
        "HealthCheckInterval",
        "HealthCheckNodeState",
    ]
    assert [line for line in lines if f"#   {line}\n" not in script] == []
    # Without CYCLE every idle node would be drained at one moment. Source: slurm.conf(5).
    assert "HealthCheckNodeState=IDLE,CYCLE" in lines


def test_what_is_checked_is_in_the_suite(fakes: Fakes) -> None:
    assert check(fakes).returncode == 0
    script = (SLURM / "health-check.sh").read_text()
    listed = script[script.index("CHECK=(") + 7 :]
    words = shlex.split(listed[: listed.index(")")])
    paths = [word for word in words if not word.startswith("-")]
    assert len(paths) > 3
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert [word for word in words if word.startswith("-")] == ["--gpucluster-profile=quick"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("ALLOCATED", ""),
        ("MIXED", ""),
        ("IDLE+DRAIN", "a fan is broken"),
        ("DOWN", ""),
        ("IDLE+COMPLETING", ""),
        ("IDLE+RESERVED", ""),
        ("IDLE+DOWN+NOT_RESPONDING", ""),
        ("", ""),
    ],
)
def test_a_node_that_is_not_idle_is_left_alone(fakes: Fakes, state: str, reason: str) -> None:
    (fakes.folder / "state").write_text(state)
    (fakes.folder / "reason").write_text(reason)
    assert check(fakes).returncode == 11
    assert check(fakes, how="").returncode == 0
    assert node(fakes) == (state, reason)
    assert [line for line in fakes.log("scontrol") if "update" in line] == []
    assert fakes.log("run") == []


def test_a_node_that_could_not_be_given_back_is_due_at_once(fakes: Fakes) -> None:
    assert check(fakes).returncode == 0
    assert (fakes.folder / "its state" / "next").exists()
    silent = check(fakes, FAKE_SILENT=f"{OURS}running")
    assert (silent.returncode, node(fakes)[0]) == (11, "IDLE+DRAIN"), silent.stdout
    assert not (fakes.folder / "its state" / "next").exists()
    assert "slurmctld does not tell why the node is drained" in silent.stdout
    assert check(fakes).returncode == 0
    assert node(fakes)[0] == "IDLE"


def test_a_check_that_was_cut_off_is_taken_up_again(fakes: Fakes) -> None:
    (fakes.folder / "state").write_text("IDLE+DRAIN")
    (fakes.folder / "reason").write_text(f"{OURS}running since yesterday")
    assert check(fakes).returncode == 0
    assert node(fakes)[0] == "IDLE"


def test_slurm_is_asked_nothing_before_the_next_check_is_due(fakes: Fakes) -> None:
    assert check(fakes).returncode == 0
    (fakes.folder / "scontrol.log").unlink()
    assert check(fakes, how="").returncode == 0
    assert fakes.log("scontrol") == []
    (fakes.folder / "its state" / "next").write_text("what is this?\n")
    assert check(fakes, how="", FAKE_SLEEP="").returncode == 0
    assert fakes.log("scontrol") != []


def test_one_check_at_a_time(fakes: Fakes) -> None:
    state = fakes.folder / "its state"
    state.mkdir()
    with subprocess.Popen(["flock", str(state / "lock"), "sleep", "30"]) as holder:
        try:
            while not (state / "lock").exists():
                pass
            done = check(fakes)
            assert (done.returncode, "another check is running here" in done.stdout) == (11, True)
            assert check(fakes, how="").returncode == 0
        finally:
            holder.terminate()
    assert fakes.log("scontrol") == []
