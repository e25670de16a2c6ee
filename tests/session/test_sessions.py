"""Sessions in this process: each finds the product's modules as if it were the first one."""

import sys

SUITE = """
def test_it():
    from pytest_gpucluster.node.fabric import nccl_advice
    from pytest_gpucluster.node.fabric.nccl_facts import Facts
    assert nccl_advice.Facts is Facts
"""


def test_modules_of_an_earlier_session_are_not_mixed_with_new_ones(project, monkeypatch):
    import pytest_gpucluster.node.fabric as package

    for name in [name for name in sys.modules if name.startswith(f"{package.__name__}.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("nccl_facts", "nccl_advice"):
        monkeypatch.delattr(package, name, raising=False)
    project.suite(SUITE)
    for _ in range(2):
        left = project.run()
        assert left.verdicts == {"test_it": "passed"}, left.output
        (project.path / "test_it.py").touch()
