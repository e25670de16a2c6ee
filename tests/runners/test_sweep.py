"""The order of a sweep, whatever the scheduler does."""

import json

import pytest

from pytest_gpucluster.errors import EnvironmentBroken, OptionError
from pytest_gpucluster.runners import sweep
from pytest_gpucluster.runners.plan import SweepPlan, parse_per_node
from pytest_gpucluster.runners.sweep_outcome import Outcome, SweepFiles

CODES = {"ACCEPTED": 0, "REJECTED": 1, "INCOMPLETE": 10, "NO ANSWER": 11}


def of(node, verdict):
    return Outcome(
        node=node, verdict=verdict, exit=CODES[verdict], failure="" if verdict == "ACCEPTED" else "why", seconds=1.5
    )


class Script:
    def __init__(self, alone, together="ACCEPTED"):
        self.verdicts, self.joint, self.started, self.stopped = alone, together, [], 0

    def run_nodes(self, plan, directory):
        self.started.append(plan.nodes)
        for node, verdict in self.verdicts:
            if isinstance(verdict, BaseException):
                raise verdict
            yield of(node, verdict)

    def run_joint(self, plan, nodes, directory):
        self.started.append(tuple(nodes))
        if isinstance(self.joint, BaseException):
            raise self.joint
        return of("together", self.joint)

    def stop(self):
        self.stopped += 1
        return ["job/x: still there"]


@pytest.fixture
def carried_out(tmp_path):
    """Carry out a sweep of n1 to n3: verdict, sweep.json, printed lines."""

    def run(scheduler, min_nodes=2):
        plan = SweepPlan(
            nodes=("n1", "n2", "n3"),
            per_node=parse_per_node("8"),
            pytest_arguments=(),
            python="python",
            node_seconds=1.0,
            joint_seconds=1.0,
            at_once=3,
            min_nodes=min_nodes,
            port=1,
        )
        printed = []
        files = SweepFiles(tmp_path, scheduler="slurm", command=["sweep"], nodes=plan.nodes)
        verdict = sweep.sweep(plan, scheduler, files, printed.append)
        assert scheduler.stopped == 1
        return verdict, json.loads((tmp_path / "sweep.json").read_text()), "\n".join(printed)

    return run


def test_the_survivors_run_together_in_the_order_of_the_nodes(carried_out):
    script = Script([("n3", "ACCEPTED"), ("n2", "REJECTED"), ("n1", "INCOMPLETE")])
    verdict, kept, printed = carried_out(script)
    assert script.started == [("n1", "n2", "n3"), ("n1", "n3")]
    assert (verdict.exit, kept["exit"], kept["finished"]) == (1, 1, True)
    assert "[2/3] n2: REJECTED after 2 s: why" in printed
    assert "2 of 3 nodes" in printed
    assert "job/x: " in printed
    assert printed.endswith(f"\n{verdict.word}, exit code 1: {verdict.reason}")


def test_too_few_survivors_do_not_run_together(carried_out):
    script = Script([("n1", "ACCEPTED"), ("n2", "ACCEPTED"), ("n3", "NO ANSWER")])
    verdict, kept, printed = carried_out(script, min_nodes=3)
    assert script.started == [("n1", "n2", "n3")]
    assert (verdict.exit, kept["together"]) == (11, None)
    assert "2 of 3 nodes" in printed
    assert "--min-nodes is 3" in printed


def test_a_node_that_comes_twice_has_its_worse_outcome(carried_out):
    for verdicts in (["ACCEPTED", "REJECTED"], ["REJECTED", "ACCEPTED"]):
        verdict, kept, _ = carried_out(Script([("n1", each) for each in verdicts] + [("n2", "ACCEPTED")]))
        assert verdict.exit == 1
        assert [each["verdict"] for each in kept["alone"]] == ["REJECTED", "ACCEPTED"]


@pytest.mark.parametrize(
    ("ends", "code", "reason"),
    [
        (KeyboardInterrupt(), 2, "interrupted by Ctrl-C"),
        (sweep.Stopped("SIGTERM"), 2, "interrupted by SIGTERM"),
        (EnvironmentBroken("kubectl is gone"), 11, "kubectl is gone"),
    ],
)
def test_an_interrupted_or_broken_sweep_keeps_its_outcomes(carried_out, ends, code, reason):
    for script in (
        Script([("n1", "ACCEPTED"), ("n2", ends)]),
        Script([("n1", "ACCEPTED"), ("n2", "ACCEPTED"), ("n3", "ACCEPTED")], ends),
    ):
        verdict, kept, _ = carried_out(script)
        assert (verdict.exit, kept["exit"], kept["finished"]) == (code, code, code != 2)
        assert reason in kept["reason"]
        assert kept["alone"][0]["node"] == "n1"
        assert kept["together"] is None


def test_what_cannot_be_kept_ends_the_sweep_and_all_that_was_started(carried_out, tmp_path):
    (tmp_path / "sweep.txt").mkdir()
    script = Script([("n1", "ACCEPTED")])
    with pytest.raises(OSError, match=r"sweep\.txt"):
        carried_out(script)
    assert script.stopped == 1


def test_nodes_have_names_that_files_and_shells_take():
    for nodes in ([], ["a", "a"], ["a/b"], ["../x"], ["-a"], ["a b"], ["a$(x)"], [""]):
        with pytest.raises(OptionError):
            sweep.require_nodes(nodes)
    sweep.require_nodes(["gpu-001", "ip-10-0-0-1.ec2.internal", "A_1"])
