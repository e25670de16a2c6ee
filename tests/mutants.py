"""Mutation test: change one place of the product and see whether the related tests of the fast tier fail.

    python tests/mutants.py                     # the planted bugs, then 300 mutants drawn with seed 1
    python tests/mutants.py --only judge,units  # of these subjects
    python tests/mutants.py --count 0           # the planted bugs alone

First come bugs that were planted by hand. Then a seeded sample of the mutants that cosmic-ray's operators make: places
are drawn evenly, then one of the mutants of each place. No mutant is what cannot change a result (``_meaning``): an
annotation or a docstring; what only forbids something, such as ``strict``; what only takes more time or memory; and
``is`` in the place of ``==``, which differ only by how Python keeps equal values. A mutant is killed if the tests fail
or do not end in time. It prints each survivor with its change, and a table; the exit code is 1 if a planted bug
survives or fewer than 90 % of the mutants are killed.

Each mutant runs in a copy of the tree, in a fork of this process, which has torch and pytest loaded but no module of
the product.
"""

import argparse
import ast
import contextlib
import difflib
import gc
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEAST_KILLED = 0.9
_SLOWEST = 8.0
"""Tests that take so many times longer than without a mutant, and a minute, do not end."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A module of the product, and the tests that a mutant of it must make fail."""

    module: str
    tests: tuple[str, ...]


def _subject(module, *tests):
    return Subject(module=f"pytest_gpucluster/{module}.py", tests=tuple(f"tests/{name}.py" for name in tests))


_JUDGE = (
    "judge/test_judge",
    "judge/test_node_or_gpu",
    "judge/test_misses",
    "judge/test_stragglers",
)
SUBJECTS = {
    "judge": _subject("judge/judge", *_JUDGE),
    "misses": _subject("judge/misses", *_JUDGE, "judge/test_explanation"),
    "verdict": _subject("journal/verdict", "journal/test_verdict", "journal/test_exit_note"),
    "units": _subject("metrics/units", "metrics/test_units"),
    "stats": _subject("metrics/stats", "metrics/test_stats"),
    "sampling": _subject("metrics/sampling", "metrics/test_sampling"),
    "launch": _subject("launch/launchers", "launch/test_launch"),
    "merge": _subject("agreement/exchange", "agreement/test_merge", "agreement/test_exchange", "agreement/test_events"),
    "busbw": _subject(
        "benchmarks/collectives",
        "benchmarks/test_collective_result",
        "benchmarks/test_collective_calls",
        "benchmarks/test_collectives",
        "simulation/test_device",
    ),
    "collective_shape": _subject(
        "benchmarks/collective_payload",
        "benchmarks/test_collective_shape",
        "benchmarks/test_payload",
        "benchmarks/test_moved_payload",
        "benchmarks/test_collective_calls",
        "simulation/test_device",
    ),
    "flops": _subject("benchmarks/training/model", "benchmarks/training/test_decoder"),
    "lora_flops": _subject(
        "benchmarks/lora/model", "benchmarks/lora/test_lora_model", "benchmarks/lora/test_given_models"
    ),
    "lora_loop": _subject(
        "benchmarks/lora/trainer",
        "benchmarks/lora/test_loop",
        "benchmarks/lora/test_plan",
        "benchmarks/lora/test_given_models",
    ),
    "hostlist": _subject("launch/hostlist", "launch/test_hostlist"),
}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A bug: in a file, a text that stands there once, and what takes its place."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _bug(file, old, new, tests):
    folder = "" if file == "thresholds.yaml" else "pytest_gpucluster/"
    return Planted(file=folder + file, old=old, new=new, tests=tuple(f"tests/{each}.py" for each in tests.split()))


PLANTED = {
    "the busbw factor of reduce_scatter is doubled": _bug(
        "benchmarks/collectives.py",
        '"reduce_scatter": (1, 0)',
        '"reduce_scatter": (2, 0)',
        "benchmarks/test_collective_result",
    ),
    "the wrong side of a max is missed": _bug(
        "judge/misses.py", "(limit.max - high)", "(high - limit.max)", "judge/test_judge judge/test_misses"
    ),
    "a rank without a value is ignored": _bug(
        "judge/judge.py",
        "for rank in sorted(context.world) if rank not in counts]",
        "for rank in () if rank not in counts]",
        "judge/test_judge",
    ),
    "INCOMPLETE exits 0": _bug(
        "journal/verdict.py",
        "Verdict(word=INCOMPLETE, exit=10,",
        "Verdict(word=INCOMPLETE, exit=0,",
        "journal/test_verdict",
    ),
    "control characters stay in the body of a testcase": _bug(
        "reports/junit.py",
        "element.text = visible(text) or None",
        "element.text = text or None",
        "reports/test_junit reports/test_junit_escaping",
    ),
    "the page escapes nothing": _bug(
        "reports/html/page.py",
        "autoescape=True",
        "autoescape=False",
        "reports/test_html_page reports/test_html_sections",
    ),
    "a minute has 6 seconds": _bug("metrics/units.py", '"min": 60 * 10**9', '"min": 6 * 10**9', "metrics/test_units"),
    "Tb/s is 8 times too large": _bug(
        "metrics/units.py",
        '{f"{p}b/s": f for p, f in',
        '{f"{p}b/s": 8 * f if p == "T" else f for p, f in',
        "metrics/test_units",
    ),
    "gradients are not divided by the number of ranks": _bug(
        "benchmarks/lora/trainer.py",
        "self._components.loss(masked_sum, targets / ranks)",
        "self._components.loss(masked_sum, targets)",
        "benchmarks/lora/test_loop",
    ),
    "the reported loss is that of the own rank": _bug(
        "benchmarks/lora/trainer.py",
        "of_ranks = self.ranks.gather([*sums.tolist(),",
        "of_ranks = (lambda own: [own] * self.ranks.count)([*sums.tolist(),",
        "benchmarks/lora/test_loop",
    ),
    "attention's operations count twice": _bug(
        "benchmarks/training/model.py",
        "+ 6 * self.layers * self.width * self.sequence",
        "+ 12 * self.layers * self.width * self.sequence",
        "benchmarks/training/test_decoder",
    ),
    "a straggler may be 10 % slower than allowed": _bug(
        "judge/misses.py",
        "if rank not in reported and ratio < required}",
        "if rank not in reported and ratio < 0.9 * required}",
        "judge/test_judge judge/test_misses judge/test_stragglers",
    ),
    "a straggler's own value is in the median": _bug(
        "judge/misses.py",
        "others = stats.median_without(ordered, [bisect.bisect_left(ordered, value)])",
        "others = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2",
        "judge/test_stragglers",
    ),
    "a range of hosts loses its last one": _bug(
        "launch/hostlist.py",
        "range(int(first), int(last) + 1)",
        "range(int(first), int(last) + (first == last))",
        "launch/test_hostlist",
    ),
    "a lost GPU counts as not supported": _bug(
        "node/nvml.py",
        'nvml.NVML_ERROR_GPU_IS_LOST: ("lost",',
        'nvml.NVML_ERROR_GPU_IS_LOST: ("not supported",',
        "node/test_nvml",
    ),
    "a pending row remap is not reported": _bug(
        "node/health/checks.py", '"rows.failed", "rows.pending", ', '"rows.failed", ', "node/health/test_examination"
    ),
    "the tolerance of a product is 100 times larger": _bug(
        "benchmarks/matmul.py",
        "bound.mul_(arithmetic.accumulation)",
        "bound.mul_(100 * arithmetic.accumulation)",
        "benchmarks/test_matmul benchmarks/test_matmul_reference",
    ),
    "a comparison ignores noise": _bug(
        "analysis/compare.py",
        "apart = new.high < old.low or old.high < new.low",
        "apart = True",
        "analysis/test_comparison_rule",
    ),
    "a calibration ignores the spread of samples": _bug(
        "analysis/calibration.py",
        "stats.mad(numbers), of_samples, ",
        "stats.mad(numbers), ",
        "analysis/test_floor",
    ),
    "rank 0 is never missing at a deadline": _bug(
        "agreement/liveness.py", "(phase.in_body if rank == 0 else", "(False if rank == 0 else", "agreement/test_watch"
    ),
    "a byte is written again after a torn write": _bug(
        "journal/journal.py",
        "del self.waiting[:written]",
        "del self.waiting[: written - (written < len(self.waiting))]",
        "journal/test_journal",
    ),
    "Xid 79 asks for nothing": _bug(
        "node/health/xid.tsv", "79\treboot the node", "79\tnone", "node/health/test_examination"
    ),
    "the floor of H100's busbw is a tenth": _bug(
        "thresholds.yaml",
        '- {when: {world_size: 8, nnodes: 1}, min: 400 GB/s, source: "acceptance of',
        '- {when: {world_size: 8, nnodes: 1}, min: 40 GB/s, source: "acceptance of',
        "judge/test_shipped_limits",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A changed file, and the tests that must notice."""

    name: str
    subject: str
    file: str
    text: str
    tests: tuple[str, ...]

    @property
    def change(self):
        """The lines that differ, as a diff without context."""
        before = (ROOT / self.file).read_text(encoding="utf-8").splitlines()
        lines = difflib.unified_diff(before, self.text.splitlines(), n=0, lineterm="")
        return "\n".join(f"    {line}" for line in list(lines)[2:])


def planted_bugs():
    """Yield the bugs that were planted by hand.

    Raises:
        ValueError: a bug's text does not stand in its file exactly once.
    """
    for name, bug in PLANTED.items():
        text = (ROOT / bug.file).read_text(encoding="utf-8")
        if text.count(bug.old) != 1:
            raise ValueError(f"{name}: {bug.old!r} stands {text.count(bug.old)} times in {bug.file}, must be once")
        yield Mutant(name=name, subject="planted", file=bug.file, text=text.replace(bug.old, bug.new), tests=bug.tests)


def sample(names, count, seed):
    """Draw mutants of some subjects, at most one of a place."""
    places = [(name, place) for name in names for place in _places(ROOT / SUBJECTS[name].module)]
    drawn, found = random.Random(seed), []
    drawn.shuffle(places)
    for name, (line, choices) in places:
        if len(found) == count:
            break
        subject = SUBJECTS[name]
        source = (ROOT / subject.module).read_text(encoding="utf-8")
        for operator, occurrence in drawn.sample(choices, len(choices)):
            text = _mutated(source, operator, occurrence)
            if text is not None and _meaning(text) != _meaning(source):
                title = f"{subject.module}:{line} {type(operator).__name__}"
                found.append(Mutant(name=title, subject=name, file=subject.module, text=text, tests=subject.tests))
                break
    return found


def _places(path):
    """Return the places of a file that operators change: each its line, and operators with their occurrence."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.operators.provider import OperatorProvider

    tree, provider = get_ast_from_path(path), OperatorProvider()
    found = {}
    for name in provider:
        if provider[name].arguments():
            continue
        operator = provider[name]()
        positions = (position for node in ast_nodes(tree) for position in operator.mutation_positions(node))
        for occurrence, (begin, end) in enumerate(positions):
            found.setdefault((begin, end), []).append((operator, occurrence))
    return [(begin[0], choices) for (begin, _), choices in sorted(found.items())]


def _mutated(source, operator, occurrence):
    from cosmic_ray.mutating import mutate_code

    text = mutate_code(source, operator, occurrence)
    with contextlib.suppress(SyntaxError):
        compile(text, "mutant", "exec")
        return str(text)
    return None


_WITHOUT_RESULT = ("strict", "fused", "maxsize", "use_cache", "local_files_only", "LOGITS_AT_ONCE")
"""Arguments of zip, AdamW, lru_cache and transformers, and the logits that are computed at a time: strict and
local_files_only forbid what cannot be, the others decide about time and memory alone."""
_SAME = {ast.Is: ast.Eq, ast.IsNot: ast.NotEq}


def _meaning(source):
    """Return what a source does: without annotations, which are never evaluated here, without docstrings, without what
    only forbids something (arguments by place or by name, changes of an instance) or has no effect on results."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords = [each for each in node.keywords if each.arg not in _WITHOUT_RESULT]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _WITHOUT_RESULT:
            node.value = ast.Constant(None)
        elif isinstance(node, ast.Compare):
            node.ops = [_SAME.get(type(each), type(each))() for each in node.ops]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arguments):
            placed = [*node.posonlyargs, *node.args]
            required = [None] * (len(placed) - len(node.defaults))
            # An argument and its default, however it is given.
            node.kw_defaults = [*required, *node.defaults, *node.kw_defaults]
            node.args = [*placed, *node.kwonlyargs]
            node.posonlyargs, node.kwonlyargs, node.defaults = [], [], []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
            node.decorator_list = [each for each in node.decorator_list if "cache" not in ast.unparse(each)]
        elif isinstance(node, ast.ClassDef):
            node.decorator_list = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant("")
    return ast.dump(tree)


class Slot:
    """A copy of the tree in which one mutant at a time is tested."""

    def __init__(self, folder):
        self.folder = folder
        ignored = shutil.ignore_patterns(".git", ".venv", "gpucluster-report", ".*_cache")
        shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored)

    @contextlib.contextmanager
    def _changed(self, mutant):
        path = self.folder / mutant.file
        before = path.read_text(encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
        path.write_text(mutant.text, encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")

    def exit_of(self, mutant, seconds):
        """Run the tests over a mutant; return pytest's exit code, or None if they do not end in time."""
        with self._changed(mutant):
            pid = os.fork()
            if pid == 0:
                self._test(mutant)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.05)
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None

    def _test(self, mutant):
        """Become pytest over the tests of a mutant, and the examples in its docstrings; never returns."""
        code = 70
        examples = ["--doctest-modules", mutant.file] if ">>> " in mutant.text else []
        try:
            os.setsid()
            output = os.open(self.folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            os.chdir(self.folder)
            os.environ["PYTHONPATH"] = str(self.folder)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.dont_write_bytecode = True
            sys.path[:0] = [str(self.folder)]
            import pytest

            code = int(
                pytest.main(
                    [
                        "-c",
                        "tests/pytest.ini",
                        "-x",
                        "-q",
                        "-m",
                        "not extended",
                        "-p",
                        "no:cacheprovider",
                        *examples,
                        *mutant.tests,
                    ]
                )
            )
        except BaseException:  # whatever it is, this process must not go on as its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def _load():
    """Load what most tests import, but nothing of the product, and no thread."""
    for name in ("torch", "torch.distributed", "numpy", "yaml", "pytest", "xmlschema", "junitparser"):
        importlib.import_module(name)
    loaded = [name for name in sys.modules if name.startswith("pytest_gpucluster")]
    assert not loaded, f"a mutant of {loaded[0]} would not be seen"
    # Or each fork's collections of garbage look through torch: half of the time of many tests.
    gc.collect()
    gc.freeze()


def _unchanged_seconds(slot, mutants):
    """Run each group of tests over the unchanged product, and return how long it takes.

    Raises:
        SystemExit: they fail, so that they tell nothing of a mutant.
    """
    taken = {}
    for mutant in mutants:
        if mutant.tests not in taken:
            same = Mutant(
                name="unchanged",
                subject="",
                file=mutant.file,
                text=(ROOT / mutant.file).read_text(encoding="utf-8"),
                tests=mutant.tests,
            )
            begin = time.monotonic()
            code = slot.exit_of(same, 600.0)
            if code != 0:
                output = (slot.folder / "output.txt").read_text(errors="replace")
                raise SystemExit(f"exit code {code} without a mutant: {' '.join(mutant.tests)}\n{output[-3000:]}")
            taken[mutant.tests] = time.monotonic() - begin
    return taken


def table(results):
    """Return how many mutants of each subject were killed."""
    all_of, killed = Counter(m.subject for m, _ in results), Counter(m.subject for m, dead in results if dead)
    lines = ["| subject | mutants | killed | share |", "| --- | ---: | ---: | ---: |"]
    rows = [*((name, killed[name], count) for name, count in all_of.items())]
    if len(rows) > 1:
        rows.append(("all", sum(killed.values()), len(results)))
    return lines + [f"| {name} | {count} | {dead} | {dead / count:.0%} |" for name, dead, count in rows]


def main(arguments=None):
    """Test mutants; return 1 if too many survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="mutants to draw (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument("--only", help=f"subjects, separated by commas: {', '.join(SUBJECTS)}; planted")
    asked = parser.parse_args(arguments)
    names = asked.only.split(",") if asked.only else ["planted", *SUBJECTS]
    if unknown := [name for name in names if name not in (*SUBJECTS, "planted")]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(SUBJECTS)}, planted")
    _load()
    mutants = list(planted_bugs()) if "planted" in names else []
    mutants += sample([name for name in names if name != "planted"], asked.count, asked.seed)
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        slot = Slot(Path(folder) / "tree")
        usual = _unchanged_seconds(slot, mutants)
        for mutant in mutants:
            code = slot.exit_of(mutant, 60.0 + _SLOWEST * usual[mutant.tests])
            dead = code != 0
            results.append((mutant, dead))
            how = "not over in time" if code is None else f"exit {code}"
            print(f"{'killed' if dead else 'SURVIVED'} ({how}) {mutant.name}", flush=True)
            if not dead:
                print(mutant.change, flush=True)
    print("\n".join(table(results)))
    drawn = [dead for mutant, dead in results if mutant.subject != "planted"]
    bugs = [mutant.name for mutant, dead in results if mutant.subject == "planted" and not dead]
    for name in bugs:
        print(f"a planted bug is not found: {name}")
    return int(bool(bugs) or sum(drawn) < LEAST_KILLED * len(drawn))


if __name__ == "__main__":
    raise SystemExit(main())
