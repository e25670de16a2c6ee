"""Pages agree with the code: what is generated, and tables; every criterion has a section, each package its line."""

import re
import runpy
from dataclasses import replace

import shipped_suite
from each import of_each
from pages import ROOT, page_named, rows
from shown import source

from pytest_gpucluster.config.workload import CRITERIA
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.judge import limits, loader
from pytest_gpucluster.metrics.measurement import METRICS
from pytest_gpucluster.node.health.xid_table import table
from pytest_gpucluster.session import options

FIGURES_PROGRAM = runpy.run_path(str(ROOT / "docs" / "limits.py"), run_name="limits")
LIMITS = loader.load(loader.shipped_path())
PHASES = ("discovery", "single-node", "fabric", "training", "lora")
PLAYBOOK = {phase: page_named(f"docs/{phase}.md").text for phase in PHASES}
FIGURES = page_named("docs/reference/limits.md")


def sections(page):
    """Criterion -> its section of a page."""
    parts = re.split(r"^## `([^`]+)`$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_generated_file_is_current():
    files = runpy.run_path(str(ROOT / "docs" / "generate.py"), run_name="generate")["files"]()
    stale = [str(path.relative_to(ROOT)) for path, text in files.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make docs`"


def test_every_variable_of_this_project_has_a_row():
    named = set(re.findall(r"\bGPUCLUSTER_[A-Z_]*[A-Z]\b", source("pytest_gpucluster")))
    rows = runpy.run_path(str(ROOT / "docs" / "reference.py"))["VARIABLES"]
    assert sorted(named - {option.variable for option in options.OPTIONS}) == sorted(rows)


def test_the_list_of_packages_is_the_tree():
    [picture] = page_named("CONTRIBUTING.md").blocks_of("text")
    folders = {path.parent.name for path in (ROOT / "pytest_gpucluster").glob("*/__init__.py")}
    assert {line.split()[0] for line in picture.text.splitlines()} == folders


def test_every_criterion_has_a_section_with_its_tests_and_what_to_do():
    items = shipped_suite.shipped_tests()
    found = {name: text for phase in PHASES for name, text in sections(PLAYBOOK[phase]).items()}
    assert sorted(found) == sorted({name for item in items for name in item.criteria})
    for name, text in found.items():
        tests = {item.name.partition("[")[0] for item in items if name in item.criteria}
        assert tests <= set(re.findall(r"`(test_\w+)(?:\[[\w-]+\])?`", text)), name
        assert any(row[2] for row in rows(text, ["you see", "look at", "what to do", "call"])), name
        assert re.findall(r"^Limits: \[`(.+)`\]\(reference/limits\.md#[\w-]+\)\.$", text, re.MULTILINE) == [name]


@of_each("phase", PHASES)
def test_the_command_of_a_phase_runs_the_criteria_of_its_page(phase):
    [block] = [one for one in re.findall(r"```console\n(.*?)```", PLAYBOOK[phase], re.S) if "gpucluster-expect" in one]
    paths = tuple(word for word in block.split() if word.startswith("acceptance/"))
    run = {name for item in shipped_suite.shipped_tests() if item.id.startswith(paths) for name in item.criteria}
    assert run >= set(sections(PLAYBOOK[phase]))
    row = re.search(rf"^\| \[.*\({phase}\.md\).*$", page_named("docs/playbook.md").text, re.MULTILINE)
    assert re.findall(r"`([^`]+)`", row[0].split("|")[3]) == list(sections(PLAYBOOK[phase]))


def test_the_page_of_limits_has_those_in_force_and_a_changed_one_is_seen():
    assert {one.name for name in CRITERIA for one in FIGURES_PROGRAM["metrics_of"](name)} == set(METRICS)
    judged = {limit.metric for limit in LIMITS.limits if limit.sku != "cpu-rehearsal"}
    assert {name for name in judged if f"`{name}`" not in FIGURES.text} == set()
    which = ("matmul.bf16.tflops", "H100 SXM")
    changed = [replace(one, min=701.0) if (one.metric, one.sku) == which else one for one in LIMITS.limits]
    assert ">= 701 of 989" in FIGURES_PROGRAM["page"](replace(LIMITS, limits=tuple(changed)))


def test_every_xid_that_asks_for_a_reset_has_a_first_step_and_a_reset_alone_is_none():
    entries = {int(key): entry for key, entry in table().items() if key.isdecimal() and key != "0"}
    steps = list(rows(page_named("docs/troubleshooting.md").text, ["Xid", "first step"]))
    ranges = [found for xids, _ in steps for found in re.findall(r"\b(\d+)(?:-(\d+))?\b", xids)]
    with_a_step = {code for first, last in ranges for code in range(int(first), int(last or first) + 1)}
    assert {code for code in with_a_step if not entries[code].rejects} == set()
    resets = {code for code, entry in entries.items() if "reset" in entry.action or "reboot" in entry.action}
    assert resets - with_a_step <= {151}
    assert [step for _, step in steps if "reset" in step and "reboot" not in step] == []


def test_keys_and_conditions_of_limits_and_words_of_verdicts_are_explained():
    page = page_named("docs/thresholds.md").text
    keys = page.partition("| key | meaning |")[2].partition("\n\n")[0].splitlines()[2:]
    assert {name for row in keys for name in re.findall(r"`(\w+)`", row.split("|")[1])} == set(loader.ENTRY_KEYS)
    conditions = page.partition("**Conditions**")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", conditions)) - {"when"} == {*limits.TOPOLOGY, *limits.KNOWN_LABELS}
    words = {word for text in verdict.EXIT_CODES.values() for word in re.findall(r"[A-Z]{6,}", text)}
    assert {word for word in words if word not in page_named("docs/glossary.md").text} == set()
