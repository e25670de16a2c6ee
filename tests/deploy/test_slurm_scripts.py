"""deploy/slurm with programs in place of Slurm's: what no Slurm on one host can be made to do, and wrong use.

The scripts are the real ones. srun runs each node's task here, one after the other; `gpucluster run` leaves the journal
that a test asks for, and all else that is asked of `gpucluster` the real one does.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from recordings import wait_until
from sessions import environment
from shell import finished

from pytest_gpucluster.cli import main

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
[[ -z $FAKE_STAYS ]] || { echo $$ >"$FAKES/scancel.pid"; exec sleep 60 >/dev/null; }
exit 1
"""
_NVIDIA_SMI = """\
#!/bin/bash
for ((gpu = 0; gpu < FAKE_GPUS; gpu++)); do echo "GPU $gpu: NVIDIA H100 80GB HBM3 (UUID: GPU-$gpu)"; done
"""
RUN = {"type": "run", "schema_version": 1, "run_id": "r", "started_at": "x", "nnodes": 2, "world_size": 16}


def a_journal(verdict, code=0, **more):
    lines = [{**RUN, **more}]
    if verdict is not None:
        lines.append({"type": "end", "verdict": verdict, "exit": code, "reason": "so"})
    return "\n".join(json.dumps(line) for line in lines)


class Fakes:
    """A folder with programs, and what they were asked."""

    def __init__(self, folder):
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

    def log(self, name):
        path = self.folder / f"{name}.log"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, script, *words, environ=None):
        own = {
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
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
            **(environ or {}),
        }
        return finished(
            ["bash", str(SLURM / script), *words],
            env=environment({name: value for name, value in own.items() if value is not None}),
            cwd=self.folder,
        )


@pytest.fixture
def fakes(tmp_path):
    return Fakes(tmp_path)


@pytest.mark.parametrize(
    ("says", "exits", "code"),
    [
        pytest.param(a_journal("ACCEPTED"), "0 0", 0, id="pass"),
        pytest.param(a_journal("ACCEPTED"), "0 11", 11, id="a node breaks"),
        pytest.param(a_journal("ACCEPTED"), "0 137", 11, id="a node is killed"),
        pytest.param(a_journal("REJECTED", 1), "1 11", 1, id="rejected"),
        pytest.param(a_journal("INCOMPLETE", 10), "10 10", 10, id="incomplete"),
        pytest.param(a_journal(None), "137 11", 11, id="cut off"),
        pytest.param("", "4 4", 4, id="usage"),
        pytest.param("", "1 1", 11, id="no word"),
        pytest.param("", "0 0", 11, id="nothing"),
    ],
)
def test_the_job_ends_with_the_verdict_and_never_better(fakes, says, exits, code):
    done = fakes.start("acceptance.sbatch", environ={"FAKE_JOURNAL": says, "FAKE_EXITS": exits})
    assert done.returncode == code, done.stdout + done.stderr
    assert f"exit code {code}; reports: {fakes.reports}/slurm-4711" in done.stdout
    assert (fakes.reports / "slurm-4711" / "rendered" / "report.html").exists() == bool(says)


def test_a_suite_that_cannot_tell_its_verdict_has_rejected_nobody(fakes):
    done = fakes.start("acceptance.sbatch", environ={"FAKE_CRASH": "yes"})
    assert (done.returncode, "answer.json" in done.stderr) == (11, True), done.stderr


def test_who_is_told_to_end_ends_its_own_ranks_alone(fakes):
    array = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}
    fakes.start("acceptance.sbatch", environ={"FAKE_TOLD": "yes", **array})
    assert fakes.log("scancel") == ["--signal=URG 4711_3"]
    (fakes.folder / "scancel.log").unlink()
    fakes.start("acceptance.sbatch", environ={"FAKE_TOLD": "yes", "SLURM_JOB_ID": "4712"})
    assert fakes.log("scancel") == ["--signal=URG 4712"]


def test_a_signal_is_not_sent_again_once_its_attempt_of_the_job_has_ended(fakes):
    """A job that is requeued has the same number, and scancel itself tries again."""
    fakes.start("acceptance.sbatch", environ={"FAKE_TOLD": "yes", "FAKE_STAYS": "yes"})
    process = Path("/proc", (fakes.folder / "scancel.pid").read_text().strip())
    wait_until(lambda: not process.exists())


def test_each_node_is_told_its_number_and_where_all_meet(fakes):
    words = ["-k", "hbm or nccl", "--gpucluster-profile=quick"]
    done = fakes.start("acceptance.sbatch", *words, environ={"GPUCLUSTER_HOSTNAME": "not everybody's", "RANK": "3"})
    assert done.returncode == 0, done.stderr
    folder = fakes.reports / "slurm-4711"
    port = 20000 + 16 * 4711 % 10000
    assert fakes.log("run") == [
        f"run --nnodes=2 --node-rank={rank} --nproc-per-node=8 --master-addr=n1 --master-port={port} -- "
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


def test_a_head_that_nobody_can_look_up_is_met_at_the_address_that_slurm_uses(fakes):
    done = fakes.start("acceptance.sbatch", environ={"HEAD_ADDRESS": None, "FAKE_NODES": "no-such-host.invalid n2"})
    assert done.returncode == 0, done.stderr
    assert all("--master-addr=10.9.8.7 " in line for line in fakes.log("run"))


def test_a_container_is_asked_for_in_every_step_where_there_is_an_image(fakes):
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
    assert (refused.returncode, "/a,b" in refused.stderr) == (2, True)


def test_a_job_that_has_lost_a_node_starts_no_suite_and_tidies_up_on_those_that_are_left(fakes):
    (fakes.folder / "bin" / "gpucluster").symlink_to(fakes.venv / "bin" / "gpucluster")
    image = {"CONTAINER_IMAGE": "image", "GPUCLUSTER_REPORT_DIR": str(fakes.folder / "reports")}
    done = fakes.start("acceptance.sbatch", environ={**image, "FAKE_LEFT": "1"})
    assert done.returncode == 11, done.stdout + done.stderr
    assert "n[1-2]" in done.stderr
    assert fakes.log("run") == []
    ready, tidy = [line for line in fakes.log("srun") if line.startswith("--")]
    # The last one counts: srun would wait for a second node until the time limit.
    assert ["--nodes=1" in line.split() for line in (ready, tidy)] == [False, True]
    assert tidy.index("--nodes=1 --ntasks=1") > tidy.index("--nodes=2")


@pytest.mark.parametrize(
    ("words", "environ", "code", "said"),
    [
        pytest.param([], {"SLURM_JOB_ID": None}, 2, "sbatch", id="no job"),
        pytest.param([], {"SUITE_DIR": "/nowhere"}, 2, "/nowhere/deploy/slurm/job.sh", id="no checkout"),
        pytest.param([], {"SUITE_VENV": "/nowhere"}, 2, "/nowhere/bin/gpucluster ", id="no venv"),
        pytest.param([], {"SLURM_GPUS_ON_NODE": None}, 2, "no GPUs", id="no GPUs"),
        pytest.param(["--junitxml=x.xml"], {}, 2, "--junitxml=x.xml: ", id="junit"),
        pytest.param(["--gpucluster-report-dir", "x"], {}, 2, "GPUCLUSTER_REPORT_DIR", id="reports"),
        pytest.param([], {"GPUCLUSTER_REPORT_DIR": "/dev/null/x"}, 11, "/dev/null/x", id="read only"),
        pytest.param([], {"FAKE_GONE": "n2"}, 11, "no answer from n2: ", id="a node is gone"),
    ],
)
def test_what_is_missing_is_named_before_anything_runs(fakes, words, environ, code, said):
    done = fakes.start("acceptance.sbatch", *words, environ=environ)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert f"BROKEN, exit code {code}: " in done.stderr
    assert fakes.log("run") == []


def test_a_rehearsal_needs_no_gpus(fakes):
    for number, words in enumerate((["--gpucluster-device=cpu"], ["--gpucluster-device", "cpu"])):
        environ = {"SLURM_GPUS_ON_NODE": None, "SLURM_JOB_ID": str(number)}
        assert fakes.start("acceptance.sbatch", *words, environ=environ).returncode == 0
    assert all("--nproc-per-node" not in line for line in fakes.log("run"))


def test_reports_are_never_overwritten(fakes):
    assert fakes.start("acceptance.sbatch").returncode == 0
    again = fakes.start("acceptance.sbatch")
    assert (again.returncode, f"{fakes.reports}/slurm-4711" in again.stderr) == (11, True)
    assert fakes.start("acceptance.sbatch", environ={"SLURM_RESTART_COUNT": "1"}).returncode == 0
    assert (fakes.reports / "slurm-4711-restart1" / "latest").exists()


def test_a_node_that_does_not_see_the_folder_says_so(fakes):
    script = (
        f"source {shlex.quote(str(SLURM / 'job.sh'))}; node_is_ready /nowhere/slurm-1 true; "
        "node_describes_itself /nowhere true"
    )
    done = finished(["bash", "-c", script], env={"SLURMD_NODENAME": "n9"})
    assert done.returncode == 1
    assert "n9 does not see /nowhere/slurm-1: " in done.stderr
    assert "n9 does not see /nowhere:" in done.stderr


def test_a_rerun_of_nothing_is_refused(fakes):
    assert fakes.start("acceptance.sbatch", environ={"SLURM_JOB_ID": "4710"}).returncode == 0
    (fakes.folder / "run.log").unlink()
    for words, said in (
        ([], "earlier job"),
        (["--lf"], "earlier job"),
        (["4710"], "--lf"),
        (["1", "--lf"], "slurm-1 "),
        (["4710", "--lf"], "slurm-4710"),
    ):
        done = fakes.start("rerun.sbatch", *words)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert fakes.log("run") == []


def test_an_array_element_runs_on_its_own_node_or_not_at_all(fakes):
    (fakes.folder / "bin" / "sbatch").symlink_to("/bin/false")
    element = {"SLURM_ARRAY_TASK_ID": "1", "GPUCLUSTER_ARRAY_NODES": "n1 n2"}
    for words, environ, code, said in (
        ([], {"SLURM_JOB_ID": None}, 2, "name the nodes"),
        (["nowhere"], {"SLURM_JOB_ID": None, "FAKE_NODES": "nowhere"}, 2, "nowhere is no node"),
        ([], {}, 2, "bash"),
        ([], {**element, "SLURM_JOB_NODELIST": "n1"}, 11, "for n2 and runs on n1"),
        ([], {**element, "SLURM_ARRAY_TASK_ID": "5"}, 2, "node of this element"),
    ):
        done = fakes.start("array-nodes.sbatch", *words, environ=environ)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert fakes.log("run") == []
    # An element is one node: with the whole cluster's figure every one of them would be refused.
    assert "\n# export GPUCLUSTER_EXPECT=1x8xH100" in (SLURM / "array-nodes.sbatch").read_text(encoding="utf-8")


def check(fakes, how="now", **more):
    """Run a health check by hand, with what the fake suite then does."""
    own = {
        "PATH": f"{fakes.folder / 'bin'}:{os.environ['PATH']}",
        "SUITE_DIR": fakes.suite,
        "SUITE_VENV": fakes.venv,
        "STATE_DIR": fakes.folder / "its state",
        "NODE": "n1",
        "EMPTY_WITHIN": 0,
    }
    said = {"FAKES": fakes.folder, "FAKE_JOURNAL": a_journal("ACCEPTED"), "FAKE_EXITS": "0", "FAKE_GPUS": "8", **more}
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in own.items()]
    lines += ["CHECK=(acceptance/)", *(f"export {name}={shlex.quote(str(value))}" for name, value in said.items())]
    conf = fakes.folder / "health.conf"
    conf.write_text("\n".join(lines) + "\n")
    return finished(
        ["bash", str(SLURM / "health-check.sh"), *([how] if how else [])],
        # As slurmd starts it: with next to nothing in its environment, not even a PATH.
        env={"HEALTH_CHECK_CONF": str(conf), "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7"},
    )


def node(fakes):
    return (fakes.folder / "state").read_text().strip(), (fakes.folder / "reason").read_text().strip()


OURS = "gpucluster health check: "


def leaves(verdict, code=0, **more):
    """What the fake suite is to do that ends with a verdict."""
    return {"FAKE_JOURNAL": a_journal(verdict, code, **more), "FAKE_EXITS": str(code)}


@pytest.mark.parametrize(
    ("more", "code", "state", "told"),
    [
        pytest.param({}, 0, "IDLE", "exit code 0: ACCEPTED", id="well"),
        pytest.param(leaves("REJECTED", 1), 1, "IDLE+DRAIN", "REJECTED, exit code 1: so", id="bad"),
        pytest.param(leaves("BROKEN", 11), 11, "IDLE", "no answer", id="broken"),
        pytest.param({"FAKE_JOURNAL": "", "FAKE_EXITS": "1"}, 11, "IDLE", "no answer", id="no word"),
        pytest.param(
            {"FAKE_JOURNAL": "", "FAKE_EXITS": "1", "DRAIN_ON": "anything"}, 11, "IDLE+DRAIN", "no verdict", id="asked"
        ),
        pytest.param(leaves("INCOMPLETE", 10), 10, "IDLE", "no answer", id="incomplete"),
        pytest.param(leaves("REHEARSED", rehearsal=True), 11, "IDLE", "rehearsal on cpu", id="rehearsal"),
        pytest.param({"FAKE_SLEEP": "50", "DEADLINE": "1"}, 11, "IDLE", " 1 s", id="deadline"),
        pytest.param({"SUITE_VENV": "/nowhere"}, 11, "IDLE", "no answer", id="no venv"),
        pytest.param({"FAKE_CRASH": "yes"}, 11, "IDLE", "ended with 1: ModuleNotFoundError", id="half a venv"),
        pytest.param(
            {"FAKE_GPUS": "7"}, 1, "IDLE+DRAIN", "REJECTED, exit code 1: nvidia-smi lists 7 of 8 GPUs", id="a GPU lost"
        ),
    ],
)
def test_only_a_rejected_node_stays_drained(fakes, more, code, state, told):
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


def test_what_is_checked_is_in_the_suite(fakes):
    assert check(fakes).returncode == 0
    script = (SLURM / "health-check.sh").read_text()
    listed = script[script.index("CHECK=(") + 7 :]
    words = shlex.split(listed[: listed.index(")")])
    paths = [word for word in words if not word.startswith("-")]
    assert len(paths) > 3
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert [word for word in words if word.startswith("-")] == ["--gpucluster-profile=quick"]


def test_a_node_that_is_not_idle_is_left_alone(fakes):
    states = ["ALLOCATED", "MIXED", "DOWN", "IDLE+COMPLETING", "IDLE+RESERVED", "IDLE+DOWN+NOT_RESPONDING", ""]
    for state, reason in [("IDLE+DRAIN", "a fan is broken"), *((state, "") for state in states)]:
        (fakes.folder / "state").write_text(state)
        (fakes.folder / "reason").write_text(reason)
        assert check(fakes).returncode == 11, state
        assert check(fakes, how="").returncode == 0, state
        assert node(fakes) == (state, reason)
    assert [line for line in fakes.log("scontrol") if "update" in line] == []
    assert fakes.log("run") == []


def test_a_node_that_could_not_be_given_back_is_due_at_once(fakes):
    assert check(fakes).returncode == 0
    assert (fakes.folder / "its state" / "next").exists()
    silent = check(fakes, FAKE_SILENT=f"{OURS}running")
    assert (silent.returncode, node(fakes)[0]) == (11, "IDLE+DRAIN"), silent.stdout
    assert not (fakes.folder / "its state" / "next").exists()
    assert "slurmctld" in silent.stdout
    assert check(fakes).returncode == 0
    assert node(fakes)[0] == "IDLE"


def test_a_check_that_was_cut_off_is_taken_up_again_and_nothing_is_asked_before_the_next_is_due(fakes):
    (fakes.folder / "state").write_text("IDLE+DRAIN")
    (fakes.folder / "reason").write_text(f"{OURS}running since yesterday")
    assert check(fakes).returncode == 0
    assert node(fakes)[0] == "IDLE"
    (fakes.folder / "scontrol.log").unlink()
    assert check(fakes, how="").returncode == 0
    assert fakes.log("scontrol") == []
    (fakes.folder / "its state" / "next").write_text("what is this?\n")
    assert check(fakes, how="").returncode == 0
    assert fakes.log("scontrol") != []


def test_one_check_at_a_time(fakes):
    state = fakes.folder / "its state"
    state.mkdir()
    with subprocess.Popen(["flock", str(state / "lock"), "sleep", "30"]) as holder:
        try:
            while not (state / "lock").exists():
                pass
            done = check(fakes)
            assert done.returncode == 11, done.stdout
            assert check(fakes, how="").returncode == 0
        finally:
            holder.terminate()
    assert fakes.log("scontrol") == []


def test_the_scripts_name_commands_that_there_are():
    """They reach the program through an array or a function, where no search for its name finds them."""
    steps = {name: main.load(name).commands for name in ("node", "runs")}
    said = [
        words.split()
        for path in sorted(SLURM.iterdir())
        for words in re.findall(
            r"""(?:call_suite|"\$\{program\[@\]\}"|120 "\$@"|"\$gpucluster"|/gpucluster") ((?:[a-z][a-z-]* ?)+)""",
            path.read_text(encoding="utf-8"),
        )
    ]
    assert len(said) >= 7
    unknown = [words for words in said if words[0] not in main.COMMANDS]
    unknown += [words for words in said if words[0] in steps and (words[1:] or [""])[0] not in steps[words[0]]]
    assert unknown == []
