"""The kustomizations of deploy/kubernetes: right by Kubernetes' schemas, safe, and of one mind with the suite."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import kubernetes_manifests as manifests
import local_pods
import pytest
from browser import require_program

import pytest_gpucluster
from pytest_gpucluster import cli, nccl_rules, options, workload_file
from pytest_gpucluster.agreement.preflight import Expectation
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.sweep import pod_template
from pytest_gpucluster.torchrun.command_line import command_line
from pytest_gpucluster.training_inputs import TrainingInputs

OVERLAYS = ("cpu-rehearsal", "discovery", "production", "single-node", "standard")
OURS = ("base", "components", "overlays", "sweep", "transformers")
"""Folders without custom resources."""
SUITES = tuple(name for name in OVERLAYS if name != "discovery")
COMPONENTS = sorted(path.name for path in (manifests.KUBERNETES / "components").iterdir())


@pytest.fixture(scope="module")
def rendered():
    """Every overlay, as kustomize renders it."""
    require_program("kubectl")
    return {name: manifests.render(manifests.KUBERNETES / "overlays" / name) for name in OVERLAYS}


@pytest.fixture
def overlay(tmp_path):
    """Write an operator's own overlay, and render it."""
    require_program("kubectl")
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


def test_a_right_document_has_no_problems():
    assert manifests.core_problems(JOB) == []
    assert manifests.problems([JOB]) == []


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        pytest.param(("spec", "completionMod"), "Indexed", "completionMod", id="a misspelt field"),
        pytest.param(("spec", "completions"), "two", "is not", id="a text for a number"),
        pytest.param((*POD, "hostNetwrk"), True, "hostNetwrk", id="deep down"),
        pytest.param((*POD, "containers"), None, "", id="no containers"),
        pytest.param(("kind",), "Jobb", "schema", id="no such kind"),
        pytest.param(("apiVersion",), "batch/v7", "schema", id="no such version"),
    ],
)
def test_a_wrong_document_is_told_with_its_name(path, value, told):
    [problem, *_] = manifests.core_problems(changed(path, value))
    assert told in problem
    assert "/it" in problem


def test_a_field_is_judged_by_the_version_that_is_asked_for():
    newer = changed(("spec", "managedBy"), "somebody")
    assert manifests.core_problems(newer, "1.29")
    assert manifests.core_problems(newer, "1.32") == []
    assert manifests.core_problems(JOB, "9.1"), "a version that nobody has a schema of is no pass"
    assert manifests.VERSIONS[0] == "1.29"
    assert len(manifests.VERSIONS) == len(set(manifests.VERSIONS)) >= 6


MOUNT = [{"name": "it", "image": "it:1", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        pytest.param((*POD, "containers"), MOUNT, "mounts data", id="no such volume"),
        pytest.param((*POD, "volumes"), [{"name": "data", "emptyDir": {}}], "mounted nowhere", id="unused volume"),
        pytest.param(
            (*POD, "volumes"),
            [{"name": "data", "configMap": {"name": "limits"}}],
            "ConfigMap limits",
            id="no ConfigMap",
        ),
        pytest.param(
            (*POD, "volumes"),
            [{"name": "data", "persistentVolumeClaim": {"claimName": "reports"}}],
            "PersistentVolumeClaim reports",
            id="no claim",
        ),
        pytest.param((*POD, "serviceAccountName"), "somebody", "ServiceAccount somebody", id="no account"),
        pytest.param((*POD, "subdomain"), "it", "Service it", id="no service"),
        pytest.param(("metadata", "name"), "It_", "no name", id="no name"),
        pytest.param((*POD, "containers"), [*MOUNT, *MOUNT], "stands twice", id="two of one name"),
        pytest.param(
            (*POD, "containers"),
            [{"name": "it", "image": "it:1", "envFrom": [{"configMapRef": {"name": "settings"}}]}],
            "reads the ConfigMap settings",
            id="no ConfigMap of variables",
        ),
        pytest.param(
            (*POD, "containers"),
            [{"name": "it", "image": "it:1", "env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}],
            "variable of the container it A stands twice",
            id="a variable twice",
        ),
    ],
)
def test_what_refers_to_nothing_is_told(path, value, told):
    document = changed(path, value)
    assert manifests.core_problems(document) == []
    assert any(told in problem for problem in manifests.reference_problems([document]))


def test_a_pod_inside_a_custom_resource_is_judged():
    template = {"spec": {"containers": [{"name": "it", "image": "it:1", "comand": ["sh"]}]}}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "it"},
        "spec": {"pytorchReplicaSpecs": {"Master": {"template": template}}},
    }
    assert [where for where, _ in manifests.pod_templates(job)] == ["spec.pytorchReplicaSpecs.Master.template"]
    assert any("comand" in problem for problem in manifests.problems([job]))
    template["spec"]["containers"][0].pop("comand")
    assert manifests.problems([job]) == []


def test_a_key_that_stands_twice_is_an_error():
    with pytest.raises(manifests.yaml.YAMLError, match="stands twice"):
        manifests.load("a: 1\nb: 2\na: 3\n")


def test_the_program_fails_on_a_planted_fault_and_where_it_cannot_look(tmp_path):
    require_program("kubectl")

    def run(*arguments, path=None):
        program = [sys.executable, manifests.__file__, *map(str, arguments)]
        environ = {**os.environ, **({"PATH": path} if path else {})}
        return subprocess.run(program, capture_output=True, text=True, env=environ, timeout=120, check=False)

    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text("resources: [job.yaml]\n")
    (folder / "job.yaml").write_text(
        "apiVersion: batch/v1\nkind: Job\nmetadata: {name: it}\nspec:\n  backofLimit: 0\n  template:\n    spec:\n"
        "      containers: [{name: it, image: it}]\n"
    )
    done = run(folder)
    assert (done.returncode, "backofLimit" in done.stdout) == (1, True)
    assert run(tmp_path / "nowhere").returncode == 2
    assert run(folder, path=str(tmp_path)).returncode == 2, "without kubectl nothing was looked at"


def test_only_what_can_be_applied_is_rendered_by_itself(tmp_path):
    builtin = "apiVersion: builtin\nkind: ReplacementTransformer\nmetadata: {name: it}\n"
    folders = {
        "part": ("kind: Component\n", {}),
        "transformer": ("resources: [it.yaml]\n", {"it.yaml": builtin}),
        "mixed": ("resources: [it.yaml, job.yaml]\n", {"it.yaml": builtin, "job.yaml": "kind: Job\n"}),
        "overlay": ("resources: [../part]\n", {}),
        "empty": ("namespace: it\n", {}),
    }
    for name, (text, files) in folders.items():
        (tmp_path / name).mkdir()
        for file, content in {"kustomization.yaml": text, **files}.items():
            (tmp_path / name / file).write_text(content)
    assert [path.name for path in manifests.kustomizations(tmp_path)] == ["empty", "mixed", "overlay"]


# ---- the overlays


def test_every_overlay_is_right_in_the_oldest_and_the_newest_kubernetes(rendered):
    """In those between, too: `make check-deploy`."""
    looked_at = {path.relative_to(manifests.KUBERNETES).as_posix() for path in manifests.kustomizations()}
    assert {"base", *(f"overlays/{name}" for name in OVERLAYS)} <= looked_at
    assert some_problems(manifests.render(manifests.KUBERNETES / "base")) == []
    for name, documents in rendered.items():
        assert some_problems(documents) == [], name
    page = (manifests.ROOT / "docs" / "kubernetes.md").read_text()
    assert f"schemas of Kubernetes {manifests.OLDEST} to {manifests.VERSIONS[-1]}." in page


def test_nothing_is_privileged_but_what_rdma_needs(rendered):
    assert {name: manifests.dangers(documents) for name, documents in rendered.items()} == {
        "cpu-rehearsal": [],
        "discovery": [],
        "production": ["root", "IPC_LOCK"],
        "single-node": [],
        "standard": [],
    }
    template = manifests.load((manifests.KUBERNETES / "sweep" / "pod.yaml").read_text())
    assert manifests.dangers(template) == []


RIGHTS = {"rdma": ["root", "IPC_LOCK"], "host-network": ["hostNetwork"], "nccl-gcp": ["hostPath"]}
BESIDE = {
    "cleanup": "namespace: gpu\n",
    "thresholds": "configMapGenerator:\n  - {name: gpucluster-thresholds, files: [thresholds.yaml]}\n"
    "generatorOptions: {disableNameSuffixHash: true}\n",
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


def with_models(name="standard"):
    return f"resources: [KUBERNETES/overlays/{name}]\ncomponents: [KUBERNETES/components/models]\n"


def inputs_of(documents, config):
    """What the suite reads from a pod's variables, by its own option parser."""
    environ = local_pods.environment(documents, 0, node="gpu-001")
    return TrainingInputs.of(options.resolve(config, environ)), environ


def model_problems(documents, inputs):
    [(_, template)] = manifests.pod_templates(local_pods.find(documents, "Job"))
    pod = {"spec": {**template["spec"], "containers": [local_pods.container(local_pods.find(documents, "Job"))]}}
    return manifests.claim_problems(pod, [inputs.model.path, inputs.data["function_calls"].path])


@pytest.mark.parametrize("name", ["standard", "single-node"])
def test_weights_and_data_are_where_the_suite_is_told_to_look_and_cannot_be_changed(
    name, overlay, tmp_path, pytestconfig
):
    """Alone in its pod, and with a collector beside it, which reads neither."""
    documents = overlay(with_models(name))
    [site] = manifests.load(CLAIM.replace("NAME", "gpucluster-models"))
    # Nobody makes the claim here, so that nobody deletes the weights with an overlay.
    [problem] = manifests.problems(documents, manifests.VERSIONS[-1])
    assert problem.endswith("is of the PersistentVolumeClaim gpucluster-models, which is nowhere")
    assert some_problems([*documents, site]) == []
    assert manifests.dangers(documents) == []
    inputs, environ = inputs_of(documents, pytestconfig)
    assert str(inputs.model) == "/models/Qwen2-7B"
    assert {key: str(source) for key, source in inputs.data.items()} == {
        "function_calls": "/models/function-calls.json"
    }
    assert environ["HF_HUB_OFFLINE"] == "1"
    assert model_problems(documents, inputs) == []
    # What the component says of a volume is what the suite takes: a folder and a file on it.
    models = tmp_path / "models"
    (models / "Qwen2-7B").mkdir(parents=True)
    (models / "Qwen2-7B" / "config.json").write_text("{}")
    here = {key: value.replace("/models", str(models)) for key, value in environ.items()}
    [missing] = TrainingInputs.of(options.resolve(pytestconfig, here)).problems()
    assert "function-calls.json: no such file" in missing
    (models / "function-calls.json").write_text("[]")
    assert TrainingInputs.of(options.resolve(pytestconfig, here)).problems() == []


def test_weights_that_could_be_changed_or_not_be_found_are_told(overlay, pytestconfig):
    documents = overlay(with_models())
    inputs, _ = inputs_of(documents, pytestconfig)

    def planted(change):
        wrong = copy.deepcopy(documents)
        pod = local_pods.find(wrong, "Job")["spec"]["template"]["spec"]
        [mount] = [each for each in suite_of(wrong)["volumeMounts"] if each["name"] == "models"]
        [volume] = [each for each in pod["volumes"] if each["name"] == "models"]
        change(mount, volume)
        return {problem.partition(": ")[2] for problem in model_problems(wrong, inputs)}

    def both(told):
        return {told.format("/models/Qwen2-7B"), told.format("/models/function-calls.json")}

    assert planted(lambda mount, volume: mount.pop("readOnly")) == both("{} can be written to")
    assert planted(lambda mount, volume: volume["persistentVolumeClaim"].pop("readOnly")) == both(
        "{} can be written to"
    )
    assert planted(lambda mount, volume: mount.update(mountPath="/weights")) == both(
        "nothing is mounted where {} should be"
    )
    assert planted(lambda mount, volume: volume.update(persistentVolumeClaim=None, emptyDir={})) == both(
        "{} is on no claim"
    )
    settings = local_pods.find(documents, "ConfigMap", "gpucluster-models")["data"]
    settings["GPUCLUSTER_DATA"] = "functioncalls=/models/function-calls.json"
    with pytest.raises(OptionError, match=r"GPUCLUSTER_DATA=functioncalls=.*unknown data 'functioncalls'"):
        inputs_of(documents, pytestconfig)


def test_the_claim_and_the_places_on_it_are_the_sites(overlay, pytestconfig):
    """The lines are those of docs/kubernetes.md."""
    page = (manifests.ROOT / "docs" / "kubernetes.md").read_text()
    [block] = [text for text in page.split("```yaml\n") if "claimName: weights" in text]
    edited = block.split("```")[0].replace("../../", "KUBERNETES/")
    documents = overlay(
        f"resources: [KUBERNETES/overlays/production, claim.yaml]\n{edited}"
        "generatorOptions: {disableNameSuffixHash: true}\n",
        claim_yaml=CLAIM.replace("NAME", "weights"),
    )
    assert some_problems(documents) == []
    inputs, _ = inputs_of(documents, pytestconfig)
    assert str(inputs.model) == "/models/hub/Qwen2-7B"
    assert str(inputs.data["function_calls"]) == "/models/data/glaive.json"
    assert model_problems(documents, inputs) == []


def test_production_names_the_models_and_does_without(overlay, rendered, pytestconfig):
    folder = manifests.KUBERNETES / "overlays" / "production"
    text = (folder / "kustomization.yaml").read_text()
    edited = text.replace("  # - ../../components/models\n", "  - ../../components/models\n")
    assert edited != text
    inputs, _ = inputs_of(rendered["production"], pytestconfig)
    assert (inputs.model, dict(inputs.data)) == (None, {})
    edited = edited.replace("../../", "KUBERNETES/")
    documents = overlay(edited, gpus_yaml=(folder / "gpus.yaml").read_text())
    inputs, _ = inputs_of(documents, pytestconfig)
    assert model_problems(documents, inputs) == []
    assert some_problems([*documents, *manifests.load(CLAIM.replace("NAME", "gpucluster-models"))]) == []


def test_the_rights_of_the_cleanup_need_the_namespace_of_the_overlay(overlay):
    [problem] = manifests.reference_problems(overlay(with_component("cleanup")))
    assert "RoleBinding/gpucluster-cleanup: the subject gpucluster-cleanup has no namespace" in problem


def test_production_does_with_a_restricted_namespace_where_everybody_may_lock_memory(overlay):
    folder = manifests.KUBERNETES / "overlays" / "production"
    text = (folder / "kustomization.yaml").read_text()
    edited = text.replace("components/rdma\n", "components/rdma-device\n").replace("../../", "KUBERNETES/")
    assert edited.count("rdma-device") == 1
    documents = overlay(edited, gpus_yaml=(folder / "gpus.yaml").read_text())
    assert some_problems(documents) == []
    assert manifests.dangers(documents) == []
    assert "rdma/rdma_shared_device_a" in suite_of(documents)["resources"]["limits"]


def test_the_sight_for_dangers_is_sharp(rendered):
    def planted(change):
        documents = copy.deepcopy(rendered["standard"])
        change(local_pods.find(documents, "Job")["spec"]["template"]["spec"], suite_of(documents))
        return manifests.dangers(documents)

    assert planted(lambda pod, suite: pod.update(hostNetwork=True)) == ["hostNetwork"]
    assert planted(lambda pod, suite: pod.pop("automountServiceAccountToken")) == ["token"]
    assert planted(lambda pod, suite: pod["securityContext"].pop("seccompProfile")) == ["seccomp"]
    assert planted(lambda pod, suite: suite["securityContext"].update(privileged=True)) == ["privileged"]
    assert planted(lambda pod, suite: suite["securityContext"].update(runAsUser=0)) == ["root"]
    assert planted(lambda pod, suite: suite["securityContext"].pop("allowPrivilegeEscalation")) == ["escalation"]
    assert planted(lambda pod, suite: suite["securityContext"]["capabilities"].update(add=["SYS_ADMIN"])) == [
        "SYS_ADMIN"
    ]


def test_a_verdict_is_never_replaced_by_a_second_try(rendered):
    for name, documents in rendered.items():
        job = local_pods.find(documents, "Job")["spec"]
        assert job["completionMode"] == "Indexed", name
        assert job["backoffLimitPerIndex"] == 0, name
        # Set to 0 it would end the other pods at the first failure, and the one that writes the reports with them.
        assert "backoffLimit" not in job, name
        assert "maxFailedIndexes" not in job, name
        assert job["podReplacementPolicy"] == "Failed", name
        assert job["template"]["spec"]["restartPolicy"] == "Never", name
        assert job["parallelism"] == job["completions"], name
        assert job["activeDeadlineSeconds"] > 0, name
        assert job["ttlSecondsAfterFinished"] > 0, name
    for name in SUITES:
        rules = local_pods.find(rendered[name], "Job")["spec"]["podFailurePolicy"]["rules"]
        assert [rule["action"] for rule in rules] == ["FailIndex", "FailIndex"]
        assert rules[1]["onExitCodes"] == {"containerName": "suite", "operator": "NotIn", "values": [0]}


def shape(documents):
    job = local_pods.find(documents, "Job")
    environ = local_pods.environment(documents, 0, node="gpu-001")
    limits = suite_of(documents)["resources"].get("limits", {})
    return (
        job["spec"]["completions"],
        int(environ["NNODES"]),
        Expectation.parse(environ["GPUCLUSTER_EXPECT"]),
        int(limits.get("nvidia.com/gpu", 0)),
    )


def test_what_is_declared_is_what_is_started(rendered):
    for name in SUITES:
        completions, nnodes, expected, gpus = shape(rendered[name])
        assert completions == nnodes == expected.nodes, name
        assert gpus == (0 if name == "cpu-rehearsal" else expected.gpus_per_node), name
    assert shape(rendered["production"])[2:] == (Expectation(nodes=2, gpus_per_node=8), 8)
    assert shape(rendered["standard"])[2:] == (Expectation(nodes=2, gpus_per_node=1), 1)
    assert shape(rendered["single-node"])[2:] == (Expectation(nodes=1, gpus_per_node=8), 8)


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
  - {name: gpucluster-settings, behavior: merge, literals: [GPUCLUSTER_EXPECT=2x8xH100]}
generatorOptions: {disableNameSuffixHash: true}
transformers: [KUBERNETES/transformers/nodes]
"""
    )
    assert manifests.problems(documents) == []
    environ = local_pods.environment(documents, 3, node="gpu-004")
    assert environ["GPUCLUSTER_EXPECT"] == "16x8xH100"
    assert environ["NNODES"] == "16"
    assert environ["MASTER_ADDR"] == "acceptance-b-0.acceptance-b"
    assert environ["GPUCLUSTER_REPORT_DIR"] == f"/reports/acceptance-b-{local_pods.UID}"
    service = local_pods.find(documents, "Service")
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "acceptance-b"}
    assert local_pods.find(documents, "Job")["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]


def test_what_an_overlay_says_of_nccl_counts_beside_the_component_of_its_fabric(overlay):
    documents = overlay(
        """
resources: [KUBERNETES/base]
components: [KUBERNETES/components/nccl-infiniband]
configMapGenerator:
  - {name: gpucluster-settings, behavior: merge, literals: [NCCL_SOCKET_IFNAME=bond0]}
generatorOptions: {disableNameSuffixHash: true}
"""
    )
    environ = local_pods.environment(documents, 0, node="gpu-001")
    assert (environ["NCCL_NET"], environ["NCCL_SOCKET_IFNAME"]) == ("IB", "bond0")


def test_pods_find_each_other_before_they_are_ready(rendered):
    for name in SUITES:
        job, service = (local_pods.find(rendered[name], kind) for kind in ("Job", "Service"))
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
        environ = local_pods.environment(rendered[name], 1, node="gpu-002")
        assert environ["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def test_the_command_is_one_that_the_suite_takes(rendered, pytester):
    for name in SUITES:
        environ = local_pods.environment(rendered[name], 1, node="gpu-002")
        words = local_pods.command(rendered[name], environ)
        assert words[:2] == ["bash", "/opt/gpucluster-scripts/suite.sh"]
        assert not any("$(" in word for word in [*words, *environ.values()]), words
        said = cli.parse(["run", *words[2:]])
        line = command_line(said.for_others, said.passed_on, environ)
        arguments = torchrun_parser().parse_args(line.arguments)
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


def torchrun_parser():
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def test_limits_that_nobody_has_written_are_told(overlay):
    documents = overlay(with_component("thresholds"))
    [problem] = manifests.reference_problems(documents)
    assert "ConfigMap gpucluster-thresholds" in problem


def test_the_presets_are_those_of_nodes_with_8_gpus(overlay):
    asked = {
        "resources-108cpu-1600gi": ({"cpu": "108", "memory": "1600Gi"}, {"cpu": "108", "memory": "1600Gi"}),
        "resources-100cpu-1000gi": ({"cpu": "100", "memory": "1000Gi"}, {"cpu": "112", "memory": "1200Gi"}),
        "resources-64cpu-1400gi": ({"cpu": "64", "memory": "1400Gi"}, {"cpu": "64", "memory": "1400Gi"}),
    }
    for name, (requests, limits) in asked.items():
        resources = suite_of(overlay(with_component(name, base="overlays/single-node")))["resources"]
        assert resources == {"requests": requests, "limits": {**limits, "nvidia.com/gpu": 8}}


def test_shared_memory_is_memory_and_has_a_size(rendered):
    for name in SUITES:
        volumes = {
            each["name"]: each for each in local_pods.find(rendered[name], "Job")["spec"]["template"]["spec"]["volumes"]
        }
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert volumes["shm"]["emptyDir"]["sizeLimit"].endswith("Gi")
        mounts = {each["mountPath"]: each["name"] for each in suite_of(rendered[name])["volumeMounts"]}
        assert mounts["/dev/shm"] == "shm"
        # The root file system takes nothing: what is written has a place.
        assert {"/tmp", "/reports"} <= set(mounts)


def test_the_name_of_the_rdma_resource_is_the_sites(overlay):
    """The patch is the one of docs/kubernetes.md."""
    page = (manifests.ROOT / "docs" / "kubernetes.md").read_text()
    [block] = [text for text in page.split("```yaml\n") if "rdma~1" in text]
    documents = overlay("resources: [KUBERNETES/overlays/production]\n" + block.split("```")[0])
    limits = suite_of(documents)["resources"]["limits"]
    assert "rdma/rdma_shared_device_a" not in limits
    assert limits["rdma/ib"] == 8


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
    template = pod_template.read(json.dumps(pod), str(path), gpus=8)
    assert template.container["name"] == "suite"
    with pytest.raises(OptionError, match=r"8 nvidia\.com/gpu, but --expect says 4"):
        pod_template.read(json.dumps(pod), str(path), gpus=4)


def test_discovery_asks_every_node_once(rendered):
    documents = rendered["discovery"]
    [job] = documents
    spec = job["spec"]["template"]["spec"]
    [term] = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    words = suite_of(documents)["command"]
    assert cli.parse(words[2].split("2>")[0].split()[1:]).json is True


def test_pods_of_a_run_are_on_different_nodes_but_in_a_rehearsal(rendered):
    for name in SUITES:
        template = local_pods.find(rendered[name], "Job")["spec"]["template"]
        affinity = template["spec"]["affinity"]
        kind = "podAffinity" if name == "cpu-rehearsal" else "podAntiAffinity"
        assert list(affinity) == [kind], name
        [term] = affinity[kind]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_reports_outlive_the_pods(rendered):
    for name in SUITES:
        job = local_pods.find(rendered[name], "Job")
        volumes = {each["name"]: each for each in job["spec"]["template"]["spec"]["volumes"]}
        collected = [each["name"] for each in job["spec"]["template"]["spec"]["containers"]] == ["suite", "collector"]
        assert collected != ("persistentVolumeClaim" in volumes["reports"]), name
        if collected:
            locks = {
                local_pods.environment(rendered[name], 0, node="n", name=each)["SUITE_LOCK"]
                for each in ("suite", "collector")
            }
            assert locks == {"/reports/.suite"}
        else:
            assert "emptyDir" not in volumes["reports"]


def gibibytes(quantity):
    assert quantity.endswith("Gi"), quantity
    return int(quantity.removesuffix("Gi"))


def test_there_is_room_for_the_checkpoints_of_a_run(rendered):
    """Kubernetes evicts a pod that writes more than its emptyDir may hold, and the reports go with it."""
    for name in SUITES:
        profile = "cpu" if name == "cpu-rehearsal" else "full"
        workload = workload_file.load(manifests.ROOT / "acceptance" / "workloads.yaml", profile=profile).workload
        _, _, expected, _ = shape(rendered[name])
        needed = expected.nodes * expected.gpus_per_node * workload.checkpoint.file_bytes / 2**30
        volumes = local_pods.find(rendered[name], "Job")["spec"]["template"]["spec"]["volumes"]
        [reports] = [each for each in volumes if each["name"] == "reports"]
        if "emptyDir" in reports:
            room = gibibytes(reports["emptyDir"]["sizeLimit"])
        else:
            claim = local_pods.find(rendered[name], "PersistentVolumeClaim")
            room = gibibytes(claim["spec"]["resources"]["requests"]["storage"])
        assert room >= 1.5 * needed > 0, name


def test_inline_commands_are_clean_shell(rendered, tmp_path: Path):
    shellcheck = require_program("shellcheck")
    found = 0
    for name, documents in rendered.items():
        for document in documents:
            for _, template in manifests.pod_templates(document):
                for each in template["spec"]["containers"]:
                    words = each.get("command", [])
                    if words[1:2] == ["-c"]:
                        found += 1
                        script = tmp_path / f"{name}.sh"
                        script.write_text(f"#!/bin/{words[0]}\n{words[2]}\n")
                        done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, check=False)
                        assert done.returncode == 0, done.stdout
    assert found
