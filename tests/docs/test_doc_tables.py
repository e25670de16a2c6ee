"""Tables of the pages agree with the code: limits, times, variables and Xids; and every criterion has a section."""

import re
import runpy
from dataclasses import replace
from types import SimpleNamespace

from each import of_each
from pages import ROOT, page_named, rows

from pytest_gpucluster.config.workload import CRITERIA
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.judge import limits, loader
from pytest_gpucluster.metrics.measurement import METRICS
from pytest_gpucluster.node.health.xid_table import table

FIGURES_PROGRAM = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "limits.py"), run_name="limits"))
"""The program that writes the figures."""
LIMITS = loader.load(loader.shipped_path())
PHASES = ("discovery", "single-node", "fabric", "training", "lora")
PLAYBOOK = {phase: page_named(f"docs/{phase}.md").text for phase in PHASES}
FIGURES = page_named("docs/reference/limits.md")
SEEN = ["you see", "look at", "what to do", "call"]
TROUBLE = page_named("docs/troubleshooting.md").text
WHOLE = page_named("docs/playbook.md").text


def sections(page):
    """Criterion -> its section of a page."""
    parts = re.split(r"^## `([^`]+)`$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_criterion_has_a_section_with_its_tests_and_what_to_do(items):
    found = {name: text for phase in PHASES for name, text in sections(PLAYBOOK[phase]).items()}
    assert sorted(found) == sorted({name for item in items for name in item.criteria})
    for name, text in found.items():
        tests = {item.name.partition("[")[0] for item in items if name in item.criteria}
        assert tests <= set(re.findall(r"`(test_\w+)(?:\[[\w-]+\])?`", text)), name
        assert any(row[2] for row in rows(text, SEEN)), name
        assert re.findall(r"^Limits: \[`(.+)`\]\(reference/limits\.md#[\w-]+\)\.$", text, re.MULTILINE) == [name]


@of_each("phase", PHASES)
def test_the_command_of_a_phase_runs_the_criteria_of_its_page(phase, items):
    [block] = [one for one in re.findall(r"```console\n(.*?)```", PLAYBOOK[phase], re.S) if "gpucluster-expect" in one]
    paths = tuple(word for word in block.split() if word.startswith("acceptance/"))
    run = {name for item in items if item.id.startswith(paths) for name in item.criteria}
    assert run >= set(sections(PLAYBOOK[phase]))
    row = re.search(rf"^\| \[.*\({phase}\.md\).*$", WHOLE, re.MULTILINE)
    assert re.findall(r"`([^`]+)`", row[0].split("|")[3]) == list(sections(PLAYBOOK[phase]))


def test_the_page_of_limits_has_those_in_force_and_a_changed_one_is_seen():
    assert {one.name for name in CRITERIA for one in FIGURES_PROGRAM.metrics_of(name)} == set(METRICS)
    judged = {limit.metric for limit in LIMITS.limits if limit.sku != "cpu-rehearsal"}
    assert {name for name in judged if f"`{name}`" not in FIGURES.text} == set()
    which = ("matmul.bf16.tflops", "H100 SXM")
    changed = [replace(one, min=701.0) if (one.metric, one.sku) == which else one for one in LIMITS.limits]
    assert ">= 701 of 989" in FIGURES_PROGRAM.page(replace(LIMITS, limits=tuple(changed)))


def numbers(text):
    """Read "1-3, 7"; what is no number is left out."""
    ranges = re.findall(r"\b(\d+)(?:-(\d+))?\b", text)
    return {code for first, last in ranges for code in range(int(first), int(last or first) + 1)}


def test_every_xid_is_listed_with_its_action_and_a_reset_alone_is_no_first_step():
    entries = {int(key): entry for key, entry in table().items() if key.isdecimal() and key != "0"}
    header = ["Xid", "meaning", "judged", "action", "next"]
    reference = list(rows(page_named("docs/reference/reference.md").text, header))
    listed = {code: (judged, action) for xids, _, judged, action, _ in reference for code in numbers(xids)}
    by_line = {*range(144, 151), 154}
    assert set(listed) == set(entries)
    assert {code for code, (judged, _) in listed.items() if judged == "by the line"} == by_line
    for code in set(listed) - by_line:
        assert listed[code] == ("hardware" if entries[code].rejects else "note", entries[code].action), code
    steps = list(rows(TROUBLE, ["Xid", "first step"]))
    with_a_step = {code for xids, _ in steps for code in numbers(xids)}
    assert {code for code in with_a_step if not entries[code].rejects} == set()
    resets = {code for code, (_, action) in listed.items() if "reset" in action or "reboot" in action}
    assert resets - with_a_step <= {151}, "those that ask for a reset have a first step"
    assert [step for _, step in steps if "reset" in step and "reboot" not in step] == []


def test_keys_and_conditions_of_limits_and_words_of_verdicts_are_explained():
    page = page_named("docs/thresholds.md").text
    keys = page.partition("| key | meaning |")[2].partition("\n\n")[0].splitlines()[2:]
    assert {name for row in keys for name in re.findall(r"`(\w+)`", row.split("|")[1])} == set(loader.ENTRY_KEYS)
    conditions = page.partition("**Conditions**")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", conditions)) - {"when"} == {*limits.TOPOLOGY, *limits.KNOWN_LABELS}
    words = {word for text in verdict.EXIT_CODES.values() for word in re.findall(r"[A-Z]{6,}", text)}
    assert {word for word in words if word not in page_named("docs/glossary.md").text} == set()
