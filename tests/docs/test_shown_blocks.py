"""Every block of a page is what its language says; limits and workloads are read by the product itself."""

from __future__ import annotations

import doc_pages
import pytest
from doc_pages import BadPage, Block, Page
from shown_blocks import complaints, metrics_of


@pytest.mark.parametrize("page", doc_pages.every_page(), ids=lambda page: page.name)
def test_every_block_is_what_its_language_says(page, tmp_path):
    with metrics_of(page.blocks):
        assert [complaint for block in page.blocks for complaint in complaints(block, tmp_path)] == []


def test_there_are_blocks_of_these_kinds_to_look_at():
    assert {"console", "text", "yaml", "python"} <= {
        block.language for page in doc_pages.every_page() for block in page.blocks
    }


WRONG = {
    "a block without a language": ("", "x", "'' is no language"),
    "a language of its own": ("sh", "ls", "'sh' is no language"),
    "YAML": ("yaml", "a: [1", "no YAML"),
    "a key twice": ("yaml", "a: 1\na: 2", "'a' comes twice"),
    "an empty YAML": ("yaml", "# nothing", "an empty document"),
    "limits: a key": (
        "yaml",
        "schema_version: 1\nskus: {H100 SXM: {limit: {}}}",
        "shown.yaml:2:19: unknown key 'limit'",
    ),
    "limits: a metric": (
        "yaml",
        "schema_version: 1\nskus: {H100 SXM: {limits: {nccl.all_reduce.busbww: {min: 3 GB/s, source: x}}}}",
        "nccl.all_reduce.busbww",
    ),
    "limits: a unit": (
        "yaml",
        "schema_version: 1\nevery_sku: {limits: {hbm.copy.bandwidth: {min: 3 TFLOPS, source: x}}}",
        "TFLOPS",
    ),
    "limits: no source": ("yaml", "schema_version: 1\nevery_sku: {limits: {clock.skew: {max: 1 ms}}}", "source"),
    "a workload": ("yaml", "schema_version: 1\nprofiles: {quick: {matmull: {}}}", "matmull"),
    "a field of Kubernetes": (
        "yaml",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: a, imag: b}]}",
        "imag",
    ),
    "a kind of Kubernetes": ("yaml", "apiVersion: batch/v1\nkind: Jobb\nmetadata: {name: a}", "obb"),
    "JSON": ("json", "{'a': 1}", "no JSON"),
    "Python": ("python", "def f(:\n    pass", "no Python"),
    "an import": ("python", "from pytest_gpucluster.metrics import Metricc", "has no Metricc"),
    "code left out": ("python", "def f():\n    ...", "an ellipsis"),
    "an ini file": ("ini", "gpucluster = true", "no ini file"),
    "an ini setting": ("ini", "[pytest]\ngpucluster_devise = cpu", "gpucluster_devise: no ini setting"),
    "a TOML setting": ("toml", "[tool.pytest.ini_options]\ngpucluster_devise = 'cpu'", "gpucluster_devise"),
    "a script": ("bash", "if true; then", "syntax error"),
    "a tab": ("yaml", "a:  # one\ttwo\n  - b", "a tab"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_fault_is_named_with_its_place(name, tmp_path):
    language, text, expected = WRONG[name]
    block = Block(page="page.md", line=7, language=language, text=f"{text}\n", before="")
    found = complaints(block, tmp_path)
    assert found != []
    assert found[0].startswith("page.md:7: ")
    assert expected in found[0]


def test_a_block_that_is_never_closed_is_named():
    with pytest.raises(BadPage, match=r"page\.md:3: this block is never closed"):
        Page(name="page.md", text="# A\n\n```console\nls\n").blocks  # noqa: B018  # it is read when it is asked for


def test_blocks_are_found_with_their_place_and_name():
    text = "# A\n\nWrite `test_mine.py`:\n\n```python\nx = 1\n```\n\n- in a list:\n\n  ```yaml\n  a: 1\n  ```\n"
    first, second = Page(name="page.md", text=text).blocks
    assert (first.where, first.language, first.text, first.file) == ("page.md:6", "python", "x = 1\n", "test_mine.py")
    assert (second.where, second.text, second.file) == ("page.md:12", "a: 1\n", "")
