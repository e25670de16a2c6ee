"""Whether blocks can be compiled, and what happens where they cannot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.step import Training
from pytest_gpucluster.benchmarks.training.throughput_setup import compile_blocks, fresh_compiler, missing_compiler

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=2, width=64, heads=2, vocab=64, sequence=16)


@pytest.mark.extended
def test_a_compiler_that_is_not_there_is_reported(tmp_path):
    # In a process of its own: torch remembers whether it has found one.
    code = (
        "import torch; from pytest_gpucluster.benchmarks.training.throughput_setup import missing_compiler; "
        "print(missing_compiler(torch.device('cpu')))"
    )
    without = {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    how = {"env": {**os.environ, **without}, "capture_output": True, "text": True, "check": True, "timeout": 240}
    child = subprocess.run([sys.executable, "-c", code], **how)
    assert re.fullmatch(r"\w+: (InvalidCxxCompiler: )?No working C\+\+ compiler found .*\n", child.stdout), child.stdout


def test_a_compiler_that_compiles_wrongly_is_reported(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda given: function(given) + 1)
    assert re.search(r"compiled code.*: \[2\.0, 5\.0", missing_compiler(CPU))


def test_what_triton_s_import_raises_is_reported(monkeypatch):
    def compile(function, **options):
        raise ImportError("cannot import name 'x' from 'triton'\nmore")

    monkeypatch.setattr(torch, "compile", compile)
    assert missing_compiler(CPU) == "ImportError: cannot import name 'x' from 'triton'"


def test_a_bug_is_no_missing_compiler(monkeypatch):
    def compile(function, **options):
        raise KeyError("x")

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(KeyError):
        missing_compiler(CPU)


def blocks_train_alike():
    """Compiled and recomputed blocks take the steps of others; they share what was compiled once."""
    data = PackedTokens(rows=4, sequence=GEOMETRY.sequence, vocab=GEOMETRY.vocab, seed=0)
    rows = torch.stack([data[row] for row in range(4)])

    def losses(compiled):
        model = make_decoder(GEOMETRY, CPU, seed=0)
        model.recompute()
        if compiled:
            compile_blocks(model)
        training = Training(model, CPU, precision="fp32")
        return [float(training.step([rows]).losses) for _ in range(3)]

    graphs = torch._dynamo.utils.counters["stats"]
    with fresh_compiler():
        before = graphs["unique_graphs"]
        assert losses(compiled=True) == pytest.approx(losses(compiled=False), rel=1e-5)
        assert graphs["unique_graphs"] - before == 1


def test_compiled_and_recomputed_blocks_train_as_others_do(monkeypatch):
    """With all of the compiler but its last part, which writes C++."""
    compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compile(self, backend="eager", **how))
    blocks_train_alike()


@pytest.mark.extended
def test_blocks_compiled_by_g_plus_plus_train_as_others_do():
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler here")
    assert missing_compiler(CPU) == ""
    blocks_train_alike()


def test_what_is_to_be_compiled_again_is_not_chosen_by_measuring():
    inductor = pytest.importorskip("torch._inductor.config")
    seen = []
    for repeatable in (False, True):
        with fresh_compiler(repeatable=repeatable):
            seen.append(inductor.deterministic)
    assert [*seen, inductor.deterministic] == [False, True, False]
