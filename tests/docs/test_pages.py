"""What a page shows is so: its links, its commands, its files and the names in it; and a mistake in any is found."""

import ast
import functools
import re
from pathlib import Path

import shipped_suite
from each import of_each
from pages import ROOT, Page, every_page, page_named
from shown import FOLDERS, source, wrong_commands, wrong_files, wrong_variables

from pytest_gpucluster.cli import main
from pytest_gpucluster.config import workload_loader
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.session import options

INDEX = page_named("docs/README.md")
OF_TORCH = re.compile(r"EADDRINUSE|The client socket has timed out|Cuda is not available|DistNetworkError")


@functools.cache
def texts():
    """All texts of the package, the suite and the scripts, a placeholder being a NUL."""
    scripts = source("deploy", ext="sh") + source("deploy", ext="sbatch")
    found = [re.sub(r'"? *\\\n\s*"?', " ", scripts)]
    for node in ast.walk(ast.parse(source("pytest_gpucluster", "acceptance"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts))
    return " ".join("\n".join(found).split())


@functools.cache
def dotted_names():
    """Metrics, criteria and keys of the workload, and the beginnings that several of them share."""

    def keys(tree, above):
        for name, below in tree.items() if isinstance(tree, dict) else ():
            yield f"{above}{name}"
            yield from keys(below, f"{above}{name}.")

    names = {*measurement.METRICS, *shipped_suite.criteria(""), *keys(workload_loader.key_tree(), "")}
    return names | {name.rpartition(".")[0] for name in names}


def wrong_links(page):
    """Yield the links of a page that lead nowhere."""
    others = {other.place(): other for other in (*every_page(), page)}
    for target, anchor in page.links:
        place = page.place(target)
        if not place.exists() or not place.is_relative_to(ROOT):
            yield f"{page.name}: {target}: there is no such file in the repository"
        elif anchor and place in others and anchor not in others[place].anchors:
            yield f"{page.name}: {target}#{anchor}: there is no such heading"


def wrong_names(page):
    """Yield what stands in backticks as a name of this project's, and is none."""
    shown = "".join(block.text for block in page.blocks)
    known = dotted_names()
    families = {name.partition(".")[0] for name in known if "." in name}
    for line, code in page.code:
        for wrong in (*_of_the_plugin(code), *_of_a_file(code, page, shown), *_of_a_message(code)):
            yield f"{page.name}:{line}: `{code}`: {wrong}"
        first, dot, last = code.rpartition(".")
        if re.fullmatch(r"[\w.]+", code) and dot and code.split(".")[0] in families and code not in known:
            everything = source("pytest_gpucluster", "acceptance") + shown
            made = f"{first}.{{" in everything and f'"{last}"' in everything  # as f"nccl.{name}"
            if code not in everything and not made:
                yield f"{page.name}:{line}: `{code}`: neither a metric, a criterion nor a key of the workload"


def _of_the_plugin(code):
    yield from wrong_variables(code)
    flags = {option.flag for option in options.OPTIONS}
    yield from (f"no option {flag}" for flag in re.findall(r"--gpucluster-[\w-]*\w", code) if flag not in flags)
    word = re.match(r"gpucluster ([a-z][\w-]*)(?![\w-]|.*:)", code)
    if word and word[1] not in main.COMMANDS:
        yield f"no command {word[1]}"


def _of_a_file(code, page, shown):
    places = (ROOT / code, ROOT / "pytest_gpucluster" / code, page.place(code))
    if re.fullmatch(rf"(?:{FOLDERS})/[\w./-]+", code) and code not in shown and not any(map(Path.exists, places)):
        yield "there is no such file"


def _of_a_message(code):
    for piece in code.split("…") if "…" in code else ():  # what is shorter is found anywhere
        words = piece.strip(" .:;,()[]")
        if len(words) > 8 and words not in texts() and not OF_TORCH.search(words):
            yield f"no text of this project has {words!r}"


def wrong(page, config, folder):
    """List what is wrong with a page: links, names, commands and files that are shown."""
    names = () if page.name == "CHANGELOG.md" else wrong_names(page)  # it has names of the past
    return [*wrong_links(page), *names, *wrong_commands(page, config), *wrong_files(page, folder)]


@of_each("page", every_page(), name=lambda page: page.name)
def test_what_a_page_shows_is_so_and_the_index_names_it(page, pytestconfig, tmp_path):
    assert wrong(page, pytestconfig, tmp_path) == []
    assert len(re.findall(r"^ *```", page.text, re.MULTILINE)) == 2 * len(page.blocks), "a block is never closed"
    listed = {INDEX.place(target) for target, _ in INDEX.links} | {INDEX.place()}
    assert not page.name.startswith("docs/") or page.place() in listed, f"{INDEX.name} lacks it"


def test_the_site_has_every_page():
    text = (ROOT / "docs" / "contents.yml").read_text(encoding="utf-8")
    contents = {f"docs/{name}.md" for name in re.findall(r"(?:file|root): ([\w/-]+)", text)}
    assert contents == {page.name for page in every_page() if re.match(r"docs/(?!decisions/[a-z])", page.name)}


PLANTED = {
    "a link": ("[that](nowhere.md)", "nowhere.md"),
    "an anchor": ("[that](ci.md#exit-code)", "ci.md#exit-code"),
    "an option in backticks": ("`--gpucluster-devise`", "--gpucluster-devise"),
    "a variable": ("`GPUCLUSTER_DEVISE=cpu`", "GPUCLUSTER_DEVISE"),
    "a metric": ("`nccl.all_reduce.bussbw`", "nccl.all_reduce.bussbw"),
    "a file": ("`deploy/slurm/none.sbatch`", "none.sbatch"),
    "a message": ("`… was never written in this project: …` and `… never reported`", "never written"),
    "a subcommand in backticks": ("`gpucluster inform`", "no command inform"),
    "limits": ("```yaml\nschema_version: 1\nskus: {H100 SXM: {limit: {}}}\n```", "'limit'"),
    "a workload": ("```yaml\nschema_version: 1\nprofiles: {quick: {matmull: {}}}\n```", "matmull"),
    "a manifest": ("```yaml\napiVersion: v1\nkind: Pod\nspec: {containers: [{name: a, imag: b}]}\n```", "imag"),
    "an import": ("```python\nfrom pytest_gpucluster.metrics.measurement import Metricc\n```", "Metricc"),
    "a setting": ("```ini\n[pytest]\ngpucluster_devise = cpu\n```", "gpucluster_devise"),
}
PLANTED |= {
    f"shown: {line}": (f"```console\nmake help\n{line}\n```", expected)
    for line, expected in {
        "gpucluster inform": "invalid choice",
        "gpucluster verdict gpucluster-report/latest --jsno x": "--jsno",
        "gpucluster run -- acceptance/ --gpucluster-devise=cpu": "--gpucluster-devise",
        "gpucluster run --nprocs=8 -- acceptance/": "--nprocs",
        "torchrun --nproc_per_nodes=8 -m pytest acceptance/": "--nproc_per_nodes",
        "torchrun --nproc-per-node=8 -m pytest acceptance/ -m singel_gpu": "singel_gpu",
        "pytest acceptence/ --gpucluster-expect=2xH100x8": "2xH100x8",
        "srun --nodes=2 gpucluster inform": "invalid choice",
        "ssh gpu-07 'cd /opt && gpucluster wach'": "invalid choice",
        "gpucluster sweep slurm --nodes 'gpu-[1-2]": "EOF",
    }.items()
}


@of_each("name", list(PLANTED))
def test_a_planted_mistake_is_found(name, pytestconfig, tmp_path):
    text, expected = PLANTED[name]
    page = Page("docs/page.md", f"# A page\n\nSee\n{text}\n")
    [found] = wrong(page, pytestconfig, tmp_path)
    assert expected in found
