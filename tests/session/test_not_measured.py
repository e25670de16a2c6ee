"""What nothing measured is no pass: values outside a test's call, GPUs without a rank, a rehearsal by a variable."""

from dataclasses import replace

import pytest

from pytest_gpucluster.agreement.preflight import Expectation, gpus_without_a_rank
from pytest_gpucluster.launch.launchers import Allocation, detect
from pytest_gpucluster.node.pci import PciGpu
from pytest_gpucluster.session import startup

FACTS = detect({}, "node-a")
IN_SLURM = replace(FACTS, scheduler=Allocation(name="slurm", nnodes=1, gpus_per_node=4))


def ranks(*nodes, visible=8, chosen=False):
    """Return what ranks say of themselves: on each node as many as given."""
    here = [(f"node-{'abc'[node]}", node) for node, count in enumerate(nodes) for _ in range(count)]
    return {
        rank: {"rank": rank, "host": host, "node_rank": node, "visible_gpus": visible, "chosen": chosen}
        for rank, (host, node) in enumerate(here)
    }


def test_a_node_with_more_gpus_than_ranks_is_named_with_what_to_declare():
    found = gpus_without_a_rank(ranks(8, 4), FACTS, None)
    assert "node-b" in found
    assert "8 GPUs" in found
    assert "4 ranks" in found
    assert "--gpucluster-expect" in found


@pytest.mark.parametrize(
    ("who", "facts", "expectation"),
    [
        pytest.param(ranks(8, 8), FACTS, None, id="a rank for each"),
        pytest.param(ranks(4), FACTS, Expectation.parse("1x4"), id="declared"),
        pytest.param(ranks(4, chosen=True), FACTS, None, id="by CUDA_VISIBLE_DEVICES"),
        pytest.param(ranks(4, visible=1), FACTS, None, id="each is shown its own"),
        pytest.param(ranks(4), IN_SLURM, None, id="by the scheduler"),
    ],
)
def test_fewer_ranks_than_gpus_may_be_meant(who, facts, expectation):
    assert gpus_without_a_rank(who, facts, expectation) == ""


def test_gpus_without_a_rank_are_a_skipped_testcase_and_leave_the_run_incomplete(project, monkeypatch):
    monkeypatch.setattr(startup.preflight, "gpus_without_a_rank", lambda *_: "node-a shows 8 GPUs and has 1 rank")
    project.suite("def test_it(): pass")
    left = project.run()
    assert (left.exit, left.end) == (10, ("INCOMPLETE", 10)), left.output
    assert left.verdicts["a_rank_for_each_gpu"].startswith("skipped")


@pytest.mark.parametrize(
    ("state", "options", "code"),
    [
        ("answers", (), 4),
        ("dead", (), 4),
        ("no driver", (), 4),
        ("hidden", (), 0),
        ("elsewhere", (), 0),
        ("answers", ("--gpucluster-device=cpu",), 0),
        ("answers", ("simulated",), 4),
    ],
)
def test_a_rehearsal_on_a_node_with_gpus_must_be_asked_for(project, monkeypatch, state, options, code):
    gpu = PciGpu(address="0000:3b:00.0", state=state, detail="planted")
    monkeypatch.setattr(startup.pci, "unlisted_gpus", lambda listed: [gpu])
    monkeypatch.setenv("GPUCLUSTER_DEVICE", "simulated" if "simulated" in options else "cpu")
    options = [option.replace("simulated", "--gpucluster-simulate=1x1xH100") for option in options]
    project.suite("def test_it(): pass")
    left = project.run(*options, device=None)
    assert left.exit == code, left.output
    assert ("0000:3b:00.0" in left.stderr) == (code == 4)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        pytest.param("measured(); yield", "test_it", id="before the test"),
        pytest.param("yield; measured()", "test_it", id="after the test"),
    ],
)
def test_what_is_measured_outside_a_test_s_call_is_an_error(project, body, name):
    project.suite(f"""
        import pytest

        @pytest.fixture
        def around(measure):
            def measured():
                measure("matmul.fp32.tflops", 1.0, unit="TFLOPS", n=512)
            {body}

        def test_it(around):
            pass
    """)
    left = project.run()
    assert (left.exit, left.end) == (11, ("BROKEN", 11)), left.output
    assert left.verdicts[name].startswith("error")


@pytest.mark.parametrize("handler", ["os._exit, 0", "lambda: os._exit(0)"], ids=["itself", "by its name"])
def test_no_atexit_handler_and_no_plugin_changes_the_exit_code(project, handler):
    project.suite(
        "def test_it(): assert False",
        conftest=f"""
            import atexit
            import os
            import pytest

            atexit.register({handler})

            @pytest.hookimpl(wrapper=True, tryfirst=True)
            def pytest_sessionfinish(session):
                session.exitstatus = 0
                yield
                session.exitstatus = 0
        """,
    )
    left = project.run_apart()
    assert (left.exit, left.end) == (1, ("REJECTED", 1)), left.output


_EXIT_CODE = """
    import pytest

    def pytest_addoption(parser):
        parser.addoption("--suppress", type=int)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(session, exitstatus):
        # As pytest-custom-exit-code does.
        if exitstatus == session.config.getoption("--suppress"):
            session.exitstatus = 0
"""


@pytest.mark.parametrize(("test", "code"), [("def test_it(): assert False", 1), ("", 5)], ids=["failed", "no test"])
def test_a_plugin_that_suppresses_an_exit_code_does_not(project, test, code):
    project.suite(test or "# nothing here", conftest=_EXIT_CODE)
    left = project.run(f"--suppress={code}")
    assert left.exit == code, left.output
    assert left.end[1] == code
