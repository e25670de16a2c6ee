"""The kustomizations of deploy/kubernetes: right by Kubernetes' schemas, safe, and of one mind with the suite."""

import copy
import json
import os

import kubernetes_manifests as manifests
import local_pods
import pytest
from kubectl import require_kubectl

import pytest_gpucluster
from pytest_gpucluster.agreement.preflight import Expectation
from pytest_gpucluster.cli import main
from pytest_gpucluster.config import workload_loader
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.node.fabric import nccl_rules
from pytest_gpucluster.runners import kubernetes_manifest
from pytest_gpucluster.runners.torchrun import command_line
from pytest_gpucluster.session import options
from pytest_gpucluster.session.selection import TrainingInputs

OVERLAYS = ("cpu-rehearsal", "discovery", "production", "single-node", "standard")
OURS = ("base", "components", "overlays", "sweep", "transformers")
"""Folders without custom resources."""
SUITES = tuple(name for name in OVERLAYS if name != "discovery")
COMPONENTS = sorted(path.name for path in (manifests.KUBERNETES / "components").iterdir())


@pytest.fixture(scope="module")
def rendered():
    require_kubectl()
    return {name: manifests.render(manifests.KUBERNETES / "overlays" / name) for name in OVERLAYS}


@pytest.fixture
def overlay(tmp_path):
    require_kubectl()
    here = os.path.relpath(manifests.KUBERNETES, tmp_path)

    def render(text, **files):
        for name, content in files.items():
            (tmp_path / name.replace("_", ".")).write_text(content)
        (tmp_path / "kustomization.yaml").write_text(text.replace("KUBERNETES", here))
        return manifests.render(tmp_path)

    return render


def suite_of(documents):
    return local_pods.container(local_pods.find(documents, "Job"))


def some_problems(documents):
    """What is wrong by the oldest and the newest version: `make check-deploy` asks every version of every overlay."""
    ends = (manifests.VERSIONS[0], manifests.VERSIONS[-1])
    return [problem for version in ends for problem in manifests.problems(documents, version)]


def with_component(*names, base="overlays/standard", more=""):
    listed = "".join(f"  - KUBERNETES/components/{name}\n" for name in names)
    return f"resources:\n  - KUBERNETES/{base}\ncomponents:\n{listed}{more}"


# ---- the validation itself


JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "it"},
    "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "it", "image": "it:1"}]}}},
}


def changed(path, value):
    document = copy.deepcopy(JOB)
    *way, last = path
    inner = document
    for key in way:
        inner = inner[key]
    inner[last] = value
    return document


POD = ("spec", "template", "spec")


def a_container(**fields):
    return [{"name": "it", "image": "it:1", **fields}]


MOUNT = a_container(volumeMounts=[{"name": "data", "mountPath": "/data"}])


def test_what_refers_to_nothing_is_told():
    twice = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    for path, value, told in (
        ((*POD, "containers"), MOUNT, "mounts data"),
        ((*POD, "volumes"), [{"name": "data", "emptyDir": {}}], "volume data"),
        ((*POD, "volumes"), [{"name": "data", "configMap": {"name": "limits"}}], "ConfigMap limits"),
        ((*POD, "serviceAccountName"), "somebody", "ServiceAccount somebody"),
        ((*POD, "subdomain"), "it", "Service it"),
        (("metadata", "name"), "It_", "Job/It_"),
        ((*POD, "containers"), a_container(envFrom=[{"configMapRef": {"name": "settings"}}]), "ConfigMap settings"),
        ((*POD, "containers"), a_container(env=twice), "variable of the container it A"),
    ):
        document = changed(path, value)
        assert manifests.core_problems(document, "1.32") == []
        assert any(told in problem for problem in manifests.reference_problems([document])), told


# ---- the overlays


def test_every_overlay_is_right_in_the_oldest_and_the_newest_kubernetes(rendered):
    """In those between, too: `make check-deploy`."""
    looked_at = {path.relative_to(manifests.KUBERNETES).as_posix() for path in manifests.kustomizations()}
    assert {"base", *(f"overlays/{name}" for name in OVERLAYS)} <= looked_at
    assert some_problems(manifests.render(manifests.KUBERNETES / "base")) == []
    for name, documents in rendered.items():
        assert some_problems(documents) == [], name
    page = (manifests.ROOT / "docs" / "kubernetes.md").read_text()
    assert f"schemas of Kubernetes {manifests.OLDEST} to {manifests.VERSIONS[-1]}" in page


def test_nothing_is_privileged_but_what_rdma_needs(rendered):
    for name, documents in rendered.items():
        assert manifests.dangers(documents) == (["root", "IPC_LOCK"] if name == "production" else []), name
    template = manifests.load((manifests.KUBERNETES / "sweep" / "pod.yaml").read_text())
    assert manifests.dangers(template) == []


RIGHTS = {"rdma": ["root", "IPC_LOCK"], "host-network": ["hostNetwork"], "nccl-gcp": ["hostPath"]}
BESIDE = {
    "thresholds": "configMapGenerator:\n  - {name: gpucluster-thresholds, files: [thresholds.yaml]}\n"
    "generatorOptions: {disableNameSuffixHash: true}\n"
}
"""Component -> what an overlay has to say as well."""


@pytest.mark.parametrize("name", sorted(set(COMPONENTS) - {"scripts", "reports-volume", "models"}))
def test_each_component_gives_the_rights_and_variables_that_it_says_and_no_more(overlay, name):
    documents = overlay(with_component(name, more=BESIDE.get(name, "")), thresholds_yaml="schema_version: 1\n")
    assert some_problems(documents) == []
    assert manifests.dangers(documents) == RIGHTS.get(name, [])
    environ = local_pods.environment(documents, 0, node="gpu-001")
    known = {option.variable for option in options.OPTIONS} | {"GPUCLUSTER_HOSTNAME"}
    assert {key for key in environ if key.startswith("GPUCLUSTER_")} <= known
    of_nccl = {key for key in environ if key.startswith("NCCL_")}
    assert of_nccl <= set(nccl_rules.RULES)
    assert bool(of_nccl) == (name.startswith("nccl-") and name != "nccl-gcp")


CLAIM = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: NAME}
spec: {accessModes: [ReadOnlyMany], resources: {requests: {storage: 1Ti}}}
"""
"""A claim of the site's, which no overlay makes."""


def model_problems(documents, inputs):
    [(_, template)] = manifests.pod_templates(local_pods.find(documents, "Job"))
    pod = {"spec": {**template["spec"], "containers": [local_pods.container(local_pods.find(documents, "Job"))]}}
    return manifests.claim_problems(pod, [inputs.model.path, inputs.data["function_calls"].path])


def test_weights_and_data_are_where_the_suite_is_told_to_look_and_cannot_be_changed(overlay, tmp_path, pytestconfig):
    """Alone in its pod, and with a collector beside it, which reads neither."""
    models = tmp_path / "models"
    (models / "Qwen2-7B").mkdir(parents=True)
    (models / "Qwen2-7B" / "config.json").write_text("{}")
    [site] = manifests.load(CLAIM.replace("NAME", "gpucluster-models"))
    for name in ("standard", "single-node"):
        documents = overlay(with_component("models", base=f"overlays/{name}"))
        # Nobody makes the claim here, so that nobody deletes the weights with an overlay.
        [problem] = manifests.problems(documents, manifests.VERSIONS[-1])
        assert "PersistentVolumeClaim gpucluster-models" in problem
        assert some_problems([*documents, site]) == []
        assert manifests.dangers(documents) == []
        environ = local_pods.environment(documents, 0, node="gpu-001")
        inputs = TrainingInputs.of(options.resolve(pytestconfig, environ))
        assert environ["HF_HUB_OFFLINE"] == "1"
        assert model_problems(documents, inputs) == []
    # What the component says of a volume is what the suite takes: a folder and a file on it.
    here = {key: value.replace("/models", str(models)) for key, value in environ.items()}
    [missing] = TrainingInputs.of(options.resolve(pytestconfig, here)).problems()
    assert "function-calls.json: " in missing
    (models / "function-calls.json").write_text("[]")
    assert TrainingInputs.of(options.resolve(pytestconfig, here)).problems() == []
    # And what could be changed, or not be found, would be seen.
    [mount] = [each for each in suite_of(documents)["volumeMounts"] if each["name"] == "models"]
    for change in ({"readOnly": False}, {"mountPath": "/weights"}):
        mount.update(change)
        assert len(model_problems(documents, inputs)) == 2


def production(overlay, old, new):
    """Render the production overlay with a line of it changed."""
    folder = manifests.KUBERNETES / "overlays" / "production"
    text = (folder / "kustomization.yaml").read_text()
    assert text.count(old) == 1
    return overlay(
        text.replace(old, new).replace("../../", "KUBERNETES/"), gpus_yaml=(folder / "gpus.yaml").read_text()
    )


def test_production_does_with_a_restricted_namespace_where_everybody_may_lock_memory(overlay):
    documents = production(overlay, "components/rdma\n", "components/rdma-device\n")
    assert some_problems(documents) == []
    assert manifests.dangers(documents) == []
    assert "rdma/rdma_shared_device_a" in suite_of(documents)["resources"]["limits"]


def of_pods(documents):
    """Return the Job, the pod's specification and its volumes by their names."""
    job = local_pods.find(documents, "Job")
    pod = job["spec"]["template"]["spec"]
    return job, pod, {each["name"]: each for each in pod.get("volumes", ())}


def test_a_verdict_is_never_replaced_by_a_second_try(rendered):
    for name, documents in rendered.items():
        job, pod, _ = of_pods(documents)
        spec = job["spec"]
        assert (spec["completionMode"], spec["backoffLimitPerIndex"]) == ("Indexed", 0), name
        # Set to 0 it would end the other pods at the first failure, and the one that writes the reports with them.
        assert not {"backoffLimit", "maxFailedIndexes"} & set(spec), name
        assert (spec["podReplacementPolicy"], pod["restartPolicy"]) == ("Failed", "Never"), name
        assert spec["parallelism"] == spec["completions"], name
        assert min(spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) > 0, name
        if name in SUITES:
            rules = spec["podFailurePolicy"]["rules"]
            assert [rule["action"] for rule in rules] == ["FailIndex", "FailIndex"]
            assert rules[1]["onExitCodes"] == {"containerName": "suite", "operator": "NotIn", "values": [0]}


@pytest.mark.parametrize("name", SUITES)
def test_pods_meet_apart_from_each_other_with_memory_and_room_and_reports_outlive_them(rendered, name):
    documents = rendered[name]
    job, pod, volumes = of_pods(documents)
    service = local_pods.find(documents, "Service")
    # They find each other before they are ready.
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    environ = local_pods.environment(documents, 1, node="gpu-002")
    assert environ["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    # On different nodes, but in a rehearsal.
    [(kind, affinity)] = pod["affinity"].items()
    assert kind == ("podAffinity" if name == "cpu-rehearsal" else "podAntiAffinity")
    [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    # The root file system takes nothing: what is written has a place.
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert gibibytes(volumes["shm"]["emptyDir"]["sizeLimit"]) > 0
    mounts = {each["mountPath"]: each["name"] for each in suite_of(documents)["volumeMounts"]}
    assert mounts["/dev/shm"] == "shm"
    assert {"/tmp", "/reports"} <= set(mounts)
    # Either on a volume of the site's, or a collector waits until they are fetched.
    if "persistentVolumeClaim" in volumes["reports"]:
        assert [each["name"] for each in pod["containers"]] == ["suite"]
        claim = local_pods.find(documents, "PersistentVolumeClaim")
        room = gibibytes(claim["spec"]["resources"]["requests"]["storage"])
    else:
        both = ["suite", "collector"]
        assert [each["name"] for each in pod["containers"]] == both
        locks = {local_pods.environment(documents, 0, node="n", name=each)["SUITE_LOCK"] for each in both}
        assert locks == {"/reports/.suite"}
        room = gibibytes(volumes["reports"]["emptyDir"]["sizeLimit"])
    # Kubernetes evicts a pod that writes more than its emptyDir may hold, and the reports go with it.
    profile = "cpu" if name == "cpu-rehearsal" else "full"
    workload = workload_loader.load(manifests.ROOT / "acceptance" / "workloads.yaml", profile=profile).workload
    _, _, expected, _ = shape(documents)
    assert room >= 1.5 * expected.nodes * expected.gpus_per_node * workload.checkpoint.file_bytes / 2**30 > 0


def gibibytes(quantity):
    assert quantity.endswith("Gi"), quantity
    return int(quantity.removesuffix("Gi"))


def shape(documents):
    environ = local_pods.environment(documents, 0, node="gpu-001")
    limits = suite_of(documents)["resources"].get("limits", {})
    return (
        local_pods.find(documents, "Job")["spec"]["completions"],
        int(environ["NNODES"]),
        Expectation.parse(environ["GPUCLUSTER_EXPECT"]),
        int(limits.get("nvidia.com/gpu", 0)),
    )


def test_what_is_declared_is_what_is_started(rendered):
    asked = {"production": "2x8", "standard": "2x1", "single-node": "1x8"}
    for name in SUITES:
        completions, nnodes, expected, gpus = shape(rendered[name])
        assert completions == nnodes == expected.nodes, name
        assert gpus == (0 if name == "cpu-rehearsal" else expected.gpus_per_node), name
        assert name not in asked or expected == Expectation.parse(asked[name])


def test_the_number_of_nodes_and_the_name_are_said_once(overlay):
    documents = overlay(
        """
resources: [KUBERNETES/overlays/production]
nameSuffix: -b
patches:
  - target: {kind: Job}
    patch: |
      - {op: replace, path: /spec/completions, value: 16}
configMapGenerator:
  - {name: gpucluster-settings, behavior: merge, literals: [GPUCLUSTER_EXPECT=2x8xH100, NCCL_SOCKET_IFNAME=bond0]}
generatorOptions: {disableNameSuffixHash: true}
transformers: [KUBERNETES/transformers/nodes]
"""
    )
    assert manifests.problems(documents) == []
    environ = local_pods.environment(documents, 3, node="gpu-004")
    assert environ["GPUCLUSTER_EXPECT"] == "16x8xH100"
    assert environ["NNODES"] == "16"
    # What an overlay says of NCCL counts beside the component of its fabric.
    assert (environ["NCCL_NET"], environ["NCCL_SOCKET_IFNAME"]) == ("IB", "bond0")
    assert environ["MASTER_ADDR"] == "acceptance-b-0.acceptance-b"
    assert environ["GPUCLUSTER_REPORT_DIR"] == f"/reports/acceptance-b-{local_pods.UID}"
    service = local_pods.find(documents, "Service")
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "acceptance-b"}
    assert local_pods.find(documents, "Job")["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]


def test_the_command_is_one_that_the_suite_takes(rendered, pytester):
    from torch.distributed.run import get_args_parser

    for name in SUITES:
        environ = local_pods.environment(rendered[name], 1, node="gpu-002")
        words = local_pods.command(rendered[name], environ)
        assert words[:2] == ["bash", "/opt/gpucluster-scripts/suite.sh"]
        assert not any("$(" in word for word in [*words, *environ.values()]), words
        said = main.parse(["run", *words[2:]])
        line = command_line(said.for_torchrun, said.forwarded, environ)
        arguments = get_args_parser().parse_args(line)
        _, nnodes, _, _ = shape(rendered[name])
        assert (arguments.nnodes, arguments.node_rank) == (str(nnodes), 1)
        assert (arguments.master_addr, arguments.master_port) == (environ["MASTER_ADDR"], 29500)
        assert arguments.nproc_per_node == ("2" if name == "cpu-rehearsal" else "gpu")
        # pytest's own parser, with the plugin's options: a misspelt one would end the run before it has begun.
        config = pytester.parseconfig(
            f"--rootdir={manifests.ROOT}", f"-c{manifests.ROOT}/pyproject.toml", *arguments.training_script_args
        )
        assert config.option.xmlpath == f"{environ['GPUCLUSTER_REPORT_DIR']}/report.xml"
        assert config.args == ["acceptance/"]


def test_images_are_pinned_to_this_version():
    for path in [path for folder in OURS for path in (manifests.KUBERNETES / folder).rglob("*.yaml")]:
        for line in path.read_text().splitlines():
            if "image: " in line and "gpucluster-acceptance" in line:
                assert line.strip().rpartition(":")[2] == pytest_gpucluster.__version__, (path, line)
            if "newTag:" in line:
                assert line.split()[-1] in (pytest_gpucluster.__version__, f"{pytest_gpucluster.__version__}-cpu"), path
            assert ":latest" not in line, (path, line)


def test_the_template_of_sweeps_is_taken_by_the_sweep():
    path = manifests.KUBERNETES / "sweep" / "pod.yaml"
    [pod] = manifests.load(path.read_text())
    assert manifests.problems([pod]) == []
    template = kubernetes_manifest.read_template(json.dumps(pod), str(path), gpus=8)
    assert template["spec"]["containers"][0]["name"] == "suite"
    with pytest.raises(OptionError, match=r"8 nvidia\.com/gpu, .* 4"):
        kubernetes_manifest.read_template(json.dumps(pod), str(path), gpus=4)


def test_discovery_asks_every_node_once(rendered):
    documents = rendered["discovery"]
    [job] = documents
    spec = job["spec"]["template"]["spec"]
    [term] = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    words = suite_of(documents)["command"]
    assert main.parse(words[2].split("2>")[0].split()[1:]).json is True
