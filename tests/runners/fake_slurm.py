"""A Slurm that is three small programs on the PATH: srun, squeue and scancel.

A file has what srun does on a node: it leaves a journal and an exit code as a run would, or hangs.
"""

import json

from fake_ssh import FakePrograms, journal_lines

_SRUN = """\
#!{python} -S
import json, os, pathlib, signal, sys, time

root = pathlib.Path({root!r})
words = sys.argv[1:]
options = {{}}
while words and words[0].startswith("-"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
nodes = options["--nodelist"].split(",") if "[" not in options["--nodelist"] else json.loads(
    (root / "nodes.json").read_text())
name = nodes[0] if len(nodes) == 1 else "together"
acts = json.loads((root / "acts.json").read_text())
act = acts.get(name, acts["*"])

def note(what, **more):
    with (root / "log.jsonl").open("a") as log:
        log.write(json.dumps({{"what": what, "name": name, "pid": os.getpid(), "at": time.time(), **more}}) + "\\n")

def bye(*_):
    if act["do"] != "be deaf":
        note("terminated")
        os._exit(143)

signal.signal(signal.SIGTERM, bye)
note("start", argv=sys.argv[1:], hostname=os.environ.get("GPUCLUSTER_HOSTNAME"))
time.sleep(act.get("seconds", 0))
if act["do"] in ("hang", "be deaf"):
    while True:
        time.sleep(0.05)
code = act.get("exit", 0)
print(act.get("says", "nothing to say"), flush=True)
for lines in act.get("journals", ()):
    [place] = [word.partition("=")[2] for word in words if word.startswith("--gpucluster-report-dir=")]
    folder = pathlib.Path(place) / f"2026010{{len(list(pathlib.Path(place).glob('2*'))) + 1}}-000000"
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
note("end", exit=code)
sys.exit(code)
"""

_SQUEUE = """\
#!{python} -S
import json, os, pathlib, sys
root = pathlib.Path({root!r})
for line in (root / "log.jsonl").read_text().splitlines():
    if json.loads(line)["what"] == "start":
        print(f"77.{{json.loads(line)['pid']}} gpucluster-sweep")
print("77.batch somebody's")
"""

_SCANCEL = """\
#!{python} -S
import json, pathlib, sys
with (pathlib.Path({root!r}) / "log.jsonl").open("a") as log:
    log.write(json.dumps({{"what": "scancel", "argv": sys.argv[1:]}}) + "\\n")
"""


class FakeSlurm(FakePrograms):
    """The programs, what they do, and what they were asked."""

    def __init__(self, root):
        super().__init__(root, {"srun": _SRUN, "squeue": _SQUEUE, "scancel": _SCANCEL})

    def acts(self, acts, nodes=()):
        """Say what happens on which node, or to the joint run ("together"); "*" for all others."""
        self.say({"*": {"do": "hang"}, **acts})
        (self.root / "nodes.json").write_text(json.dumps(list(nodes)))

    def environment(self, nodelist):
        """Return what an allocation of these nodes adds to the environment."""
        return {"PATH": self.path, "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": nodelist}

    def noted(self, what):
        """Return the notes of a kind."""
        return [note for note in self.notes if note["what"] == what]


def leaves(exit=0, **lines):
    """Return the act of a run that leaves one journal; its launcher ends as torchrun does, with 1 for any failure."""
    return {"do": "leave", "journals": [journal_lines(exit=exit, **lines)], "exit": min(exit, 1)}


REJECTED = leaves(outcome="failed", message="matmul 1 TFLOPS < 2 TFLOPS", verdict="REJECTED", exit=1)
