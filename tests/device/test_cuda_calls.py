"""The back end of a GPU, where there is none: its calls have the signatures of the installed torch.

torch's functions stand here as autospecs, so that a call with a wrong argument fails. Its operators check arguments by
their schema, and shapes and layouts with tensors that are said to be on a GPU and have no data.
"""

import ast
import inspect
import re
from pathlib import Path
from unittest.mock import MagicMock, call, create_autospec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpucluster import device
from pytest_gpucluster.device import products
from pytest_gpucluster.device.backends import Cuda, return_memory
from pytest_gpucluster.device.clock import EventClock
from pytest_gpucluster.device.identity import VisibleGpus
from pytest_gpucluster.device.products import deterministic
from pytest_gpucluster.errors import EnvironmentBroken

GPU = torch.device("cuda", 2)
SOURCES = sorted(Path(device.__file__).parent.glob("*.py"))
EVENT, STREAM = torch.cuda.Event, torch.cuda.Stream
aten = torch.ops.aten


def names_used():
    """The names in torch.cuda that the package's code has, ``nccl.version`` among them."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                named = re.fullmatch(r"(?:self\._)?torch\.cuda\.([\w.]+)", ast.unparse(node))
                found |= {named[1]} if named else set()
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda, in which all that the package uses is an autospec, and nothing else can be called."""
    stands = MagicMock(spec_set=["nccl", *(name for name in names_used() if "." not in name)])
    for name in names_used():
        holder, _, last = name.rpartition(".")
        honest = getattr(torch.cuda.nccl if holder else torch.cuda, last)
        assert callable(honest), name
        (stands.nccl if holder else stands).attach_mock(create_autospec(honest), last)
    for one in (stands.Stream, stands.current_stream):
        one.return_value = create_autospec(STREAM, instance=True)
    monkeypatch.setattr(torch, "cuda", stands)
    return stands


def test_all_names_in_torch_cuda_are_there_and_stand_in_the_tests():
    assert {"Event", "Stream", "synchronize", "mem_get_info", "nccl.version", "cudart", "_sleep"} <= names_used()


def test_a_wrong_call_would_be_seen(cuda):
    with pytest.raises(TypeError, match="unexpected keyword"):
        torch.cuda.synchronize(devices=GPU)
    with pytest.raises(AttributeError):
        torch.cuda.seconds()


def test_each_call_names_the_device_and_no_other_becomes_the_current_one(cuda):
    by = Cuda(GPU)
    cuda.mem_get_info.return_value = (7, 100)
    cuda.get_device_properties.return_value = MagicMock(L2_cache_size=50, multi_processor_count=132)
    cuda.memory_reserved.return_value, cuda.memory_allocated.return_value = 3, 4
    cuda.max_memory_allocated.return_value, cuda.get_device_capability.return_value = 9, (9, 0)
    assert (by.free_bytes(), by.total_bytes(), by.cache_bytes(), by.reserved_bytes()) == (7, 100, 50, 3)
    assert cuda.mock_calls[0] == call.empty_cache(), "what the allocator keeps counts as free"
    assert (by.reset_peak(), by.peak_bytes(), by.capability) == (4, 9, (9, 0))
    assert "132 multiprocessors" in by.kind
    by.synchronize()
    named = [each for each in cuda.mock_calls if each != call.empty_cache()]
    assert {each.args for each in named} == {(GPU,)}
    by.make_current()
    return_memory()
    assert cuda.mock_calls[-2:] == [call.set_device(GPU), call.empty_cache()]


def test_a_side_stream_begins_after_the_current_one_and_the_current_one_goes_on_after_it(cuda):
    by, current = Cuda(GPU), cuda.current_stream.return_value
    side = by.side_stream()
    assert cuda.Stream.call_args == call(GPU)
    by.fork(side)
    assert side.wait_stream.call_args == call(current)
    by.on(side)
    by.on(None)
    assert cuda.stream.call_args_list == [call(side), call(None)]
    current.wait_stream.assert_not_called()
    by.join(side)
    assert current.wait_stream.call_args == call(side)
    cuda.current_stream.reset_mock()
    by.fork(None)
    by.join(None)
    cuda.current_stream.assert_not_called()


def test_a_region_records_two_events_and_waits_for_nothing(cuda):
    clock = Cuda(GPU).clock()
    assert isinstance(clock, EventClock)
    cuda.Event.side_effect = events = [create_autospec(EVENT, instance=True) for _ in range(2)]
    clock.get_ahead(2, seconds=0.0)
    assert cuda.device.call_args == call(GPU)
    assert cuda._sleep.call_args == call(200_000)
    with clock.region():
        pass
    assert cuda.Event.call_args_list == [call(enable_timing=True)] * 2
    assert [event.record.call_args for event in events] == [call(cuda.current_stream.return_value)] * 2
    cuda.synchronize.assert_not_called()
    events[0].elapsed_time.return_value = 250.0
    assert clock.read() == [0.25]
    assert events[0].elapsed_time.call_args == call(events[1])
    assert cuda.synchronize.call_args == call(GPU)


@pytest.mark.parametrize("ends", ["well", "with an error", "at once: it cannot be pinned"])
def test_memory_is_pinned_where_it_is_and_let_go_when_no_copy_runs(cuda, ends):
    runtime, buffer = cuda.cudart.return_value, torch.zeros(4, dtype=torch.int64)
    runtime.cudaHostRegister.return_value = 2 if ends.startswith("at once") else 0
    if ends.startswith("at once"):
        told = r"cuda:2: CUDA cannot pin 3\.2e-08 GB .*memory: error 2"
        with pytest.raises(EnvironmentBroken, match=told), Cuda(GPU).pinned(buffer):
            pass
        runtime.cudaHostUnregister.assert_not_called()
        return
    try:
        with Cuda(GPU).pinned(buffer):
            assert runtime.cudaHostRegister.call_args == call(buffer.data_ptr(), 32, 1)
            assert cuda.device.call_args == call(GPU)
            cuda.synchronize.assert_not_called()
            if ends != "well":
                raise KeyError
    except KeyError:
        pass
    assert cuda.mock_calls[-2:] == [call.synchronize(GPU), call.cudart().cudaHostUnregister(buffer.data_ptr())]


def test_the_gpus_that_are_visible(cuda, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    cuda.nccl.version.return_value = (2, 29, 3)
    cuda.is_available.return_value, cuda.device_count.return_value = True, 8
    gpus = VisibleGpus()
    assert gpus.software() == {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": "2.29.3"}
    assert gpus.count() == 8
    cuda.is_available.return_value = False
    assert gpus.count() == 0
    cuda.get_device_properties.return_value = MagicMock(uuid="1f2e", total_memory=5)
    found = gpus[3]
    assert (found.uuid, found.memory_bytes, cuda.get_device_properties.call_args) == ("1f2e", 5, call(3))


def test_whether_a_gpu_is_in_use_is_asked_before_torch_is_made_deterministic(cuda, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    cuda.is_initialized.return_value = False
    with deterministic():
        pass
    cuda.is_initialized.return_value = True
    with pytest.raises(EnvironmentBroken), deterministic():
        pass


class Calls(TorchDispatchMode):
    """torch's operators that are called, checked by their schema before they come here."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func)
        if func is aten._scaled_mm.out:  # the one that writes to a given matrix has no checks of its own without a GPU
            named = {name: value for name, value in kwargs.items() if name != "out"}
            found, out = aten._scaled_mm.default(*args, **named), kwargs["out"]
            assert (found.shape, found.dtype, found.device) == (out.shape, out.dtype, out.device)
            return out
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "fp8"])
def test_a_product_is_one_call_into_torch_that_suits_the_matrices(scaled):
    dtype = torch.float8_e4m3fn if scaled else torch.bfloat16
    with FakeTensorMode():
        multiply = Cuda(GPU).product(scaled=scaled)
        a, row_major = (torch.empty(shape, device=GPU, dtype=dtype) for shape in ((32, 64), (48, 64)))
        right, wrong = row_major.t(), torch.empty(64, 48, device=GPU, dtype=dtype)
        out = torch.empty(32, 48, device=GPU, dtype=torch.bfloat16)
        with Calls() as calls:
            multiply(a, right, out)
        assert calls.names == [aten._scaled_mm.out if scaled else aten.mm.out]
        if scaled:
            with pytest.raises(RuntimeError, match="col"), Calls():
                multiply(a, wrong, out)


def test_the_newer_scaled_product_is_called_as_its_signature_says(monkeypatch):
    newer = create_autospec(torch.nn.functional.scaled_mm)
    monkeypatch.delattr(torch, "_scaled_mm")
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", newer)
    out = newer.return_value = torch.zeros(2, 2)
    products.scaled_product(torch.device("cpu"))(out, out, torch.ones(2, 2))
    [given] = newer.call_args_list
    assert given.kwargs == {"output_dtype": torch.float32, "use_fast_accum": True}
    assert len(inspect.signature(torch.nn.functional.scaled_mm).parameters) >= len(given.args)


OPERATIONS = {
    "copy": (("words", "words"), aten.copy_.default),
    "read": (("words", "total"), aten.sum.IntList_out),
    "write": (("words", 3), aten.fill_.Scalar),
    "h2d": (("h2d", "host", "words"), aten.copy_.default),
    "d2h": (("d2h", "words", "host"), aten.copy_.default),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_in_a_timed_region_is_one_call_into_torch(name):
    arguments, operator = OPERATIONS[name]
    tensors = {"words": torch.ones(64, dtype=torch.int64), "total": torch.ones((), dtype=torch.int64)}
    tensors["host"] = tensors["words"].clone()
    operation = getattr(Cuda(GPU), "copy_over_link" if name in ("h2d", "d2h") else name)
    with Calls() as calls:
        operation(*(tensors.get(each, each) for each in arguments))
    assert calls.names == [operator]
