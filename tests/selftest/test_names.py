"""Which names of torch and NVML the product's code uses, and what would be found of a version without them."""

import pytest

from pytest_gpucluster.selftest.names import problem, uses


def test_all_that_this_version_uses_is_here():
    found = list(uses())
    assert {problem(use) for use in found if not use.optional} == {""}
    assert {
        "torch.mm",
        "torch.distributed.new_group",
        "torch.distributed.ProcessGroup.abort",
        "torch.float8_e4m3fn",
        "pynvml.nvmlDeviceGetHandleByUUID",
        "pynvml.nvmlDeviceGetSerial",
        "pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
    } <= {use.name for use in found}


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("torch.missing_one(1)", "torch.missing_one is missing (node/it.py:1)"),
        ("dist.new_group([0], no_such=1)", "torch.distributed.new_group: got an unexpected keyword argument"),
        ("self._nvml.nvmlInit(1, 2, 3)", "pynvml.nvmlInit: too many positional arguments"),
        ("f('nvmlDeviceGetNothing')", "pynvml.nvmlDeviceGetNothing is missing"),
        ("torch.nn.functional.relu(x)", ""),
        ("nvml.read(uuid, query)", ""),
        ("dist.new_group(*ranks, **more)", ""),
    ],
)
def test_a_missing_name_and_other_arguments_are_found(tmp_path, code, wrong):
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "it.py").write_text(code)
    problems = [problem(use) for use in uses(tmp_path) if use.where.startswith("node/it.py")]
    assert "".join(problems).startswith(wrong)
    assert bool(problems and problems[0]) == bool(wrong)
