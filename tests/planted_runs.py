"""Sessions of the acceptance suite's own files with faults in them.

Of what trains, each test is run once for each fault that ``planted/planted_NAME.py`` has for it (``session``); such
sessions are shared by the tests of several modules. Of devices, links and nodes, a plan says which copy of a test has
which fault (``run_planted``).
"""

import functools
import json
from pathlib import Path

import image_files
import torchrun

TESTS = Path(__file__).parent
ACCEPTANCE = TESTS.parent / "acceptance"
LONGEST_SECONDS = 1200.0
"""Of a session, and no measure of anything: what hangs is ended by the deadline of its test."""
TRAININGS = ("training", "ddp", "fsdp", "checkpoint", "scaling", "failure_propagation")
SMALL = [
    f"--gpucluster-workload={change}"
    for change in (
        *("fsdp.steps=2", "checkpoint.size=1MiB"),
        *("nccl.all_reduce.sizes=64kB", "training.throughput.workers=0"),
    )
]
SHORT = {
    "steps": 12,
    "warmup_steps": 1,
    "global_batch": 4,
    "micro_batch": 2,
    "sequence": 64,
    "rows": 200,
    "held_out_blocks": 5,
    "parity": "fp32",
    "parity_steps": 2,
    "parity_sequence": 64,
    "checkpoint_every": 8,
    "calls": 2,
    "call_tokens": 4,
}
"""Of LoRA's tiny training: small, and yet each condition but the final loss can hold. That needs more steps."""
LIMITS = """
schema_version: 1
every_sku:
  limits:
    lora.final_loss:
      when: {labels: {model: lora_tiny}}
      max: 6.2 nats
      source: a test's own, for few steps
    lora.held_out_ratio:
      when: {labels: {model: lora_tiny}}
      max: 0.999 ratio
      source: likewise
    lora.all_token_loss:
      when: {labels: {model: lora_tiny, recipe: contract}}
      max: 6 nats
      source: a test's own, for few steps
"""
NODES = ("node-a", "node-b")


def session(directory, criteria, *options, **settings):
    """Run the tests of some files of acceptance/, each once for each fault that ``planted/`` has for it."""
    files = {path.name: path.read_text(encoding="utf-8") for path in (TESTS / "planted").glob("*.py")}
    files["conftest.py"] = files.pop("each_fault.py")
    for name in ("workloads.yaml", *(f"test_{criterion}.py" for criterion in criteria)):
        files[name] = acceptance_file(name)
    started = torchrun.start(directory, files, *options, deadline=300.0, timeouts="stuck=60", **settings)
    started.deadline = started.let_end = LONGEST_SECONDS
    return started.wait()


def _once(start):
    runs = []

    @functools.wraps(start)
    def started(factory):
        if not runs:
            runs.append(start(factory))
        return runs[0]

    return started


@_once
def two_ranks(factory):
    """Every training criterion on two ranks of one node."""
    return session(factory.mktemp("two_ranks"), TRAININGS, *SMALL)


@_once
def four_ranks(factory):
    """What takes two nodes with two ranks each, or shows on one rank of many."""
    return session(factory.mktemp("four_ranks"), ("fsdp", "checkpoint", "scaling"), *SMALL, hosts=NODES)


@_once
def one_rank_a_node(factory):
    """Two nodes with one rank each, and nothing wrong."""
    return session(factory.mktemp("one_rank"), ("scaling", "failure_propagation"), hosts=NODES, ranks=1)


@_once
def fine_tuning(factory):
    """What needs transformers and peft, on two ranks."""
    directory = factory.mktemp("fine_tuning")
    images = image_files.write_idx(directory / "data", rows=30, suffix=".gz")
    options = [f"--gpucluster-workload=lora.tiny.{key}={value}" for key, value in SHORT.items()]
    options += ["--gpucluster-workload=vision.workers=1"]
    options += [f"--gpucluster-data=images={images}", "--gpucluster-thresholds=limits.yaml"]
    (directory / "suite").mkdir()
    (directory / "suite" / "limits.yaml").write_text(LIMITS, encoding="utf-8")
    return session(directory, ("qwen2_lora", "vision"), *options, extras=True)


def nodeid(test, fault):
    """Return how ``FILE::test[parameters]`` is called with a fault: test_FILE.py of the acceptance suite."""
    file, _, name = test.partition("::")
    name = f"{name[:-1]}-{fault}]" if name.endswith("]") else f"{name}[{fault}]"
    return f"test_{file}.py::{name}"


def result(run, test, fault):
    """Return what the journal has of a test with a fault."""
    [found] = [each for each in run.journal.results if each.nodeid == nodeid(test, fault)]
    return found


def assert_failed(found, culprits, *fields, kind="WrongResult"):
    """A test has failed because of these ranks, with an error that has all the fields in its text."""
    assert (found.outcome, tuple(found.culprits)) == ("failed", culprits), found.text
    assert kind in found.message, found.message
    assert [field for field in fields if field not in found.text] == [], found.text


def others(run, *expected):
    """Return tests that have neither passed nor failed, but for those whose fault is expected to do something else."""
    return [
        one.nodeid
        for one in run.journal.results
        if one.outcome not in ("passed", "failed") and not one.nodeid.endswith(tuple(f"{fault}]" for fault in expected))
    ]


# ---- a plan of copies and their faults -------------------------------------------------------------------------------


def acceptance_file(name):
    """Return the text of a file of acceptance/."""
    return (ACCEPTANCE / name).read_text(encoding="utf-8")


def run_planted(directory, plan, conftest, *options, ranks, hosts=("node-a",), environment=None, **files):
    """Run the planned tests, and no others, by torchrun.

    Args:
        directory: where the suite lies and all output goes.
        plan: a copy of a file, such as "matmul__noisy" of test_matmul.py -> name of a test -> its fault; "" for none.
        conftest: of tests/planted, without its suffix; it plants the faults.
        options: of pytest.
        ranks: on each node.
        hosts: what the nodes call themselves.
        environment: what the conftest asks for.
        files: more files of the suite; in their names __ is a dot.
    """
    suite = {f"test_{copy}.py": acceptance_file(f"test_{copy.partition('__')[0]}.py") for copy in plan}
    suite |= {name.replace("__", "."): text for name, text in files.items()}
    suite["workloads.yaml"] = acceptance_file("workloads.yaml")
    for name, source in (("conftest.py", conftest), ("planted.py", "planted")):
        suite[name] = (TESTS / "planted" / f"{source}.py").read_text(encoding="utf-8")
    planted = json.dumps({f"test_{copy}": tests for copy, tests in plan.items()})
    run = torchrun.start(
        directory,
        suite,
        *options,
        ranks=ranks,
        hosts=hosts,
        deadline=60.0,
        environment={"PLANTED": planted, **(environment or {})},
    )
    run.deadline = 300.0  # all faults come one after the other
    return run.wait()


def result_of(run, copy, test):
    """Return what the journal has of a test of a copy; its name is without "test_"."""
    wanted = f"test_{copy}.py::test_{test}"
    [found] = [each for each in run.journal.results if each.nodeid == wanted]
    return found


def measured(result):
    """Return the measurements of a result by their metrics. Of several with one metric the last counts."""
    return {one.metric: one for one in result.measurements}


def artifacts_of(run, copy, test):
    """Return the files in the folder of a test: name -> text."""
    name = test.replace("[", "_").replace("]", "")
    [folder] = (run.directory / "reports" / "latest" / "artifacts").glob(f"test_{copy}.py_test_{name}")
    return {path.name: path.read_text() for path in folder.iterdir()}
