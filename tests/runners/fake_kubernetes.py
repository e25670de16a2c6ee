"""A Kubernetes that is one small program on the PATH: a kubectl that keeps what it is given in files.

A pod of a Job is what a file says of its node: over, running, or pending; or its command is really run, here.
"""

from fake_ssh import FakePrograms

_KUBECTL = """\
#!{python} -S
import json, os, pathlib, signal, subprocess, sys

root = pathlib.Path({root!r})
acts = json.loads((root / "acts.json").read_text())
words = [word for word in sys.argv[1:] if not word.startswith("--namespace=")]
given = sys.stdin.read() if "--filename=-" in words else ""
with (root / "log.jsonl").open("a") as log:
    log.write(json.dumps({{"argv": sys.argv[1:], "given": json.loads(given) if given else None}}) + "\\n")

def fail(text):
    sys.stderr.write(text + "\\n")
    sys.exit(1)

def option(name):
    return next((word.partition("=")[2] for word in words if word.startswith(name + "=")), "")

def run(act, job, index, node):
    pod = job["spec"]["template"]["spec"]["containers"][0]
    name, message = job["metadata"]["name"], root / f"message-{{job['metadata']['name']}}-{{index}}"
    service = f"{{name}}-0.{{name}}"
    command = [word.replace("$$", "$").replace("/dev/termination-log", str(message)).replace(service, "localhost")
        for word in pod["command"]]
    environ = {{**os.environ, "JOB_COMPLETION_INDEX": str(index), "GPUCLUSTER_HOSTNAME": node,
        "KUBERNETES_SERVICE_HOST": "fake"}}
    with (root / f"log-{{name}}-{{index}}").open("wb") as output:
        shell = ["sh", "-c", '"$@"; echo $? > ' + f"'{{message}}.exit'", "sh", *command]
        subprocess.Popen(shell, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True)

def pod(name, index, node):
    act = acts.get("together" if "-together" in name else node) or acts.get("*")
    status = {{"phase": "Running", "containerStatuses": [{{"name": "suite", "state": {{"running": {{}}}}}}]}}
    code, message = act.get("exit"), act.get("message", "")
    if isinstance(code, list):
        code = code[index]
    if act["do"] == "run":
        kept = root / f"message-{{name}}-{{index}}"
        ended = pathlib.Path(f"{{kept}}.exit")
        text = ended.read_text().strip() if ended.exists() else ""
        code = int(text) if text else None
        message = kept.read_text() if kept.exists() else ""
    if act["do"] == "pend":
        status = {{"phase": "Pending", "conditions": [{{"type": "PodScheduled", "status": "False",
            "reason": "Unschedulable", "message": "0/3 nodes are available: 1 Insufficient nvidia.com/gpu"}}]}}
    elif act["do"] == "evict":
        status = {{"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}}
    elif code is not None:
        status = {{"phase": "Failed" if code else "Succeeded", "containerStatuses": [{{"name": "suite", "state": {{
            "terminated": {{"exitCode": code, "message": message, "reason": act.get("reason", "Error"),
            "startedAt": "2026-01-02T03:04:05Z", "finishedAt": "2026-01-02T03:05:06Z"}}}}}}]}}
    spec = {{}} if act["do"] == "pend" else {{"nodeName": act.get("node", node)}}
    return {{"kind": "Pod", "metadata": {{"name": f"{{name}}-{{index}}-x",
        "annotations": {{"batch.kubernetes.io/job-completion-index": str(index)}}}}, "spec": spec, "status": status}}

def hosts(job):
    term = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    [term] = term["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    names = {{node["metadata"]["labels"]["kubernetes.io/hostname"]: node["metadata"]["name"] for node in acts["nodes"]}}
    return [names[host] for host in term["matchExpressions"][0]["values"]]

def is_over(job):
    job_acts = acts.get("job", {{}})
    looks = root / f"looks-{{job['metadata']['name']}}"
    count = int(looks.read_text()) + 1 if looks.exists() else 1
    looks.write_text(str(count))
    return job_acts.get("after") is not None and count > job_acts["after"]

if words[0] == "create" and "--dry-run=client" in words:
    print(pathlib.Path(option("--filename")).read_text())
elif words[0] == "create":
    what = json.loads(given)
    (root / f"{{what['kind'].lower()}}-{{what['metadata']['name']}}.json").write_text(given)
    if acts.get("refuse") == what["kind"]:
        fail(f"Error from server (Forbidden): {{what['kind']}} is forbidden")
    if what["kind"] == "Job":
        for index, node in enumerate(hosts(what)):
            act = acts.get("together" if "-together" in what["metadata"]["name"] else node) or acts.get("*")
            if act["do"] == "run":
                run(act, what, index, node)
elif words[:2] == ["get", "nodes"]:
    names = [word for word in words[2:] if not word.startswith("-")]
    known = {{node["metadata"]["name"]: node for node in acts["nodes"]}}
    strange = [name for name in names if name not in known]
    if strange:
        fail(f'Error from server (NotFound): nodes "{{strange[0]}}" not found')
    print(json.dumps({{"kind": "List", "items": [known[name] for name in names or known] if
        option("--selector") != "none" else []}}))
elif words[:2] == ["get", "job"]:
    if acts.get("deaf"):
        fail("The connection to the server was refused")
    job = json.loads((root / f"job-{{words[2]}}.json").read_text())
    over = is_over(job)
    conditions = [{{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}}] if over else []
    print(json.dumps({{**job, "status": {{"conditions": conditions}}}}))
elif words[:2] == ["get", "pods"]:
    name = option("--selector").partition("=")[2]
    job = json.loads((root / f"job-{{name}}.json").read_text())
    pods = [pod(name, index, node) for index, node in enumerate(hosts(job))]
    job_acts = acts.get("job", {{}})
    if job_acts.get("after") is not None and int((root / f"looks-{{name}}").read_text()) > job_acts["after"]:
        pods = [each for each in pods if each["status"]["phase"] != "Running"]  # ended and deleted
    print(json.dumps({{"kind": "PodList", "items": pods}}))
elif words[0] == "logs":
    path = root / ("log-" + words[1].removeprefix("pod/").removesuffix("-x"))
    print(path.read_text() if path.exists() else "its output")
elif words[0] == "delete":
    print("deleted")
else:
    fail(f"error: unknown command {{words}}")
"""


def node(name, *, ready="True", cordoned=False):
    """Return a node whose host is not called as the node is."""
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": f"host-{name}"}},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {"conditions": [{"type": "Ready", "status": ready, "message": "kubelet says so"}]},
    }


class FakeKubernetes(FakePrograms):
    """The program, the outcomes of its pods, and what it was asked: ``argv``, and ``given`` to its standard input."""

    def __init__(self, root):
        super().__init__(root, {"kubectl": _KUBECTL})

    def acts(self, nodes, **acts):
        """Say which nodes there are, and the outcome of the pod on each, or of those of the joint run."""
        self.say({"nodes": list(nodes), **acts})

    def created(self, kind):
        """Return what was made of a kind."""
        return [call["given"] for call in self.notes if call["given"] and call["given"]["kind"] == kind]

    def deleted(self):
        """Return what was deleted, without the options."""
        calls = [call["argv"] for call in self.notes if "delete" in call["argv"]]
        return [word for argv in calls for word in argv if "/" in word]
