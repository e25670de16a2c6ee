"""The variables of deploy/kubernetes/components/nccl-*, held against the advice for a node with that fabric."""

from pathlib import Path

import made_nodes
import pytest
import yaml

from pytest_gpucluster.node.fabric.nccl_advice import GOOGLE_SCRIPT, advise
from pytest_gpucluster.node.fabric.nccl_facts import collect_facts
from pytest_gpucluster.node.fabric.nccl_rules import RULES

COMPONENTS = Path(__file__).parent.parent.parent / "deploy" / "kubernetes" / "components"
OF_NCCL = ("NCCL_", "FI_", "UCX_")
FABRICS = {
    "nccl-infiniband": made_nodes.infiniband,
    "nccl-roce": made_nodes.roce,
    "nccl-ethernet": made_nodes.ethernet,
    "nccl-aws": made_nodes.efa,
    "nccl-azure": made_nodes.azure,
    "nccl-gcp": made_nodes.roce,
}
"""Component -> a node that it is meant for."""


def variables(folder):
    told = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    literals = [one for made in told.get("configMapGenerator", ()) for one in made.get("literals", ())]
    found = dict(one.split("=", 1) for one in literals)
    for patch in told.get("patches", ()):
        document = yaml.safe_load((folder / patch["path"]).read_text(encoding="utf-8"))
        for container in document["spec"]["template"]["spec"].get("containers", ()):
            found |= {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}
    return found


def advised(root, component, given):
    node = FABRICS[component](root)
    if not any(one.name == "eth0" for one in node.found):
        node.found.clear()
        node.network("eth0", real=False, speed=None)
    node.environ |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", **given}
    return advise(collect_facts(node.sources()))


@pytest.mark.parametrize("component", FABRICS)
def test_a_component_sets_nothing_that_hurts_on_its_own_fabric(tmp_path, component):
    given = variables(COMPONENTS / component)
    found = advised(tmp_path, component, given)
    # Behind a pod's own interface nobody sees the card that TCP goes over.
    assert (found.fabric.kind is None) is (component == "nccl-ethernet")
    assert [f"{one.name}={one.value}: {one.why}" for one in found.remove] == []
    assert {name for name in given if name.startswith(OF_NCCL)} <= set(RULES)


def test_every_component_is_looked_at_one_for_another_network_harms_and_google_s_script_is_the_advised_one(tmp_path):
    assert {path.name for path in COMPONENTS.glob("nccl-*")} == set(FABRICS)
    given = variables(COMPONENTS / "nccl-ethernet")
    assert "NCCL_NET" in {one.name for one in advised(tmp_path, "nccl-infiniband", given).remove}
    assert GOOGLE_SCRIPT in variables(COMPONENTS / "nccl-gcp").values()
