import pytest
from each import of_each

from pytest_gpucluster import errors
from pytest_gpucluster.errors import connection_cut, gpu_died, kind_of, text_of, translate_nvls


def cuda(text):
    return RuntimeError(
        f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported at some other API call"
    )


NO_NVLS = RuntimeError(
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.29.7\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 2 'out of memory'.\n"
    "This is usually caused by a system or configuration error in the Fabric Manager or NVSwitches.\n"
)
"""As NCCL 2.29.7 and torch word it."""


class BadText(RuntimeError):
    def __str__(self):
        raise ValueError("no text")


# How the GPU died, what torch says, and the outcome of a call. A GPU that died of its hardware is always a verdict.
DEATHS = [
    ("hardware", "uncorrectable ECC error encountered", "failed"),
    ("hardware", "uncorrectable NVLink error detected during the execution", "failed"),
    ("hardware", "hardware stack error", "failed"),
    ("hardware", "Invalid access of peer GPU memory over nvlink or a hardware error", "failed"),
    ("unknown", "an illegal memory access was encountered", "error"),
    ("unknown", "an illegal instruction was encountered", "error"),
    ("unknown", "misaligned address", "error"),
    ("unknown", "operation not supported on global/shared address space", "error"),
    ("unknown", "invalid program counter", "error"),
    ("unknown", "unspecified launch failure", "error"),
    ("unknown", "device-side assert triggered", "error"),
    ("unknown", "the launch timed out and was terminated", "error"),
    ("unknown", "context is destroyed", "error"),
    (None, "out of memory", "failed"),
    (None, "invalid argument", "failed"),
    (None, "no CUDA-capable device is detected", "failed"),
    (None, "the list contained nothing", "failed"),
]


@of_each("case", DEATHS)
def test_how_a_gpu_died_decides_between_a_verdict_and_a_broken_run(case):
    died, text, outcome = case
    assert gpu_died(cuda(text)) == died
    assert kind_of(cuda(text), "call") == outcome
    if died == "hardware":
        assert [kind_of(cuda(text), when) for when in ("setup", "teardown")] == ["failed"] * 2


def test_words_of_cuda_in_an_error_of_something_else_kill_no_gpu():
    assert gpu_died(AssertionError("CUDA error: uncorrectable ECC error encountered")) is None
    assert gpu_died(RuntimeError("an illegal memory access was encountered")) is None


def test_errors_that_torch_raises_are_runtime_errors():
    import torch

    assert issubclass(torch.AcceleratorError, RuntimeError)
    assert issubclass(torch.distributed.DistBackendError, RuntimeError)


def test_an_error_of_nccl_that_carries_cudas_is_recognised():
    error = RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 214 'uncorrectable ECC error encountered'"
    )
    assert gpu_died(error) == "hardware"


@pytest.mark.parametrize(
    ("error", "setup", "call"),
    [
        pytest.param(AssertionError("x"), "error", "failed", id="an assertion"),
        pytest.param(pytest.fail.Exception("x"), "error", "failed", id="pytest.fail"),
        pytest.param(ValueError("x"), "error", "failed", id="any exception"),
        pytest.param(errors.HardwareFault("x"), "failed", "failed", id="a hardware fault"),
        pytest.param(errors.WrongResult("x"), "failed", "failed", id="a wrong result"),
        pytest.param(errors.InconclusiveMeasurement("x"), "failed", "failed", id="samples that scatter"),
        pytest.param(errors.CommunicationError("x"), "error", "error", id="no process group"),
        pytest.param(errors.StoreError("x"), "error", "error", id="no store"),
        pytest.param(errors.PeerGaveUp("x"), "error", "error", id="a peer that gave up"),
        pytest.param(errors.EnvironmentBroken("x"), "error", "error", id="a broken environment"),
        pytest.param(errors.MeasurementError("x"), "error", "error", id="no measurement"),
        pytest.param(errors.UnitError("x"), "error", "error", id="a wrong unit"),
        pytest.param(errors.UsageProblem("x"), "error", "error", id="a wrong use"),
        pytest.param(BadText(), "error", "failed", id="an exception that cannot say what it is"),
        pytest.param(KeyboardInterrupt(), "error", "failed", id="no Exception at all"),
    ],
)
def test_the_kind_of_a_failure_is_what_the_exception_says_or_where_it_happened(error, setup, call):
    assert [kind_of(error, when) for when in ("setup", "call", "teardown")] == [setup, call, setup]
    assert text_of(error).endswith(": ValueError)" if isinstance(error, BadText) else "x" if error.args else "")


@pytest.mark.parametrize("place", ["beginning", "end"])
def test_of_a_huge_text_both_ends_are_looked_at(place):
    filler, cut = "x" * 10_000_000, "Connection closed by peer"
    huge = RuntimeError(f"{cut}\n{filler}" if place == "beginning" else f"{filler}\n{cut}")
    assert connection_cut(huge)
    # Patterns are never searched for in all of it, which takes half a second each.
    assert len(text_of(huge)) <= 100_001
    dead = str(cuda("uncorrectable ECC error encountered"))
    assert gpu_died(RuntimeError(f"{dead}\n{filler}" if place == "beginning" else f"{filler}\n{dead}")) == "hardware"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.1.1]:4711", True, id="gloo"),
        pytest.param("[..] Read error [127.0.1.1]:4711: Connection reset by peer", True, id="a reset"),
        pytest.param("writev [127.0.0.1]:4711: Broken pipe", True, id="a pipe"),
        pytest.param("Gloo connectFullMesh failed with [..] no error", True, id="the making of a group"),
        pytest.param("failed to recv, got 0 bytes", True, id="the store in the making of a group"),
        pytest.param("ncclRemoteError: remote process exited or there was a network error", True, id="nccl"),
        pytest.param("The size of tensor a (3) must match the size of tensor b (4)", False, id="anything else"),
        pytest.param("", False, id="nothing"),
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, errors.CommunicationError])
def test_a_peer_that_is_gone_is_recognised_by_what_the_backends_say(kind, text, expected):
    assert connection_cut(kind(text)) is expected


def test_the_same_words_in_a_tests_own_failure_are_its_own():
    assert connection_cut(errors.PeerGaveUp("rank 0 gave up"))
    assert not connection_cut(AssertionError("Connection closed by peer"))
    assert not connection_cut(ConnectionResetError("Connection reset by peer"))
    assert not connection_cut(BadText())


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class DistError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError("Input/output error"), id="the operating system"),
        pytest.param(ImportError("no module named apex"), id="a missing package"),
        pytest.param(MemoryError(), id="host memory"),
        pytest.param(OutOfMemoryError("CUDA out of memory"), id="GPU memory"),
        pytest.param(DistError("NCCL error: unhandled system error"), id="communication"),
        pytest.param(type("Inner", (DistError,), {})("ncclRemoteError"), id="a kind of communication error"),
    ],
)
def test_what_the_environment_lacks_is_no_verdict_about_hardware(error):
    assert kind_of(error, "call") == "error"


def test_memory_for_nvls_that_nccl_cannot_take_is_an_error_of_its_own_and_of_the_environment():
    found = translate_nvls(NO_NVLS)
    assert isinstance(found, errors.NvlsFailed)
    assert kind_of(found, "call") == "error"
    assert "of size 2097152" in str(found)
    assert "Fabric Manager" in str(found)
    assert found.__cause__ is NO_NVLS
    assert translate_nvls(found) is found


@pytest.mark.parametrize("other", [cuda("out of memory"), BadText(), AssertionError(str(NO_NVLS)), KeyboardInterrupt()])
def test_another_error_keeps_its_words(other):
    assert translate_nvls(other) is other
