"""A run as plain text for a terminal or a mail: the header before the first test, the summary after the last.

The header shows the cluster, its limits and settings; the summary shows the verdict, the criteria with failures first,
and what did not run. No line is wider than the given width, and no untrusted text acts on a terminal. Colour only
repeats the words.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import Cluster, Run
from pytest_gpucluster.journal.verdict import RUNNING
from pytest_gpucluster.reports.criterion_text import (
    LARGEST_MARGIN,
    STYLES,
    WORDS,
    bound_text,
    comparison_text,
    culprit_text,
    margin_text,
    value_text,
)
from pytest_gpucluster.reports.summary import Outline, Row, display_name, margin_ratio, outline, worst_first
from pytest_gpucluster.reports.tables import measured_pairs, metric_name, rank_name, seconds_in_tests, time_lines
from pytest_gpucluster.text import (
    Column,
    clean,
    columns,
    fitted_table,
    one_line,
    paragraph,
    plural,
    shortened,
    styled,
    total,
    widths,
)

NAME = "gpucluster"
_SOFTWARE = {"driver": "driver", "cuda": "CUDA", "nccl": "NCCL", "torch": "torch"}
_INDENT = " " * 4
_CPU = "CPU rank"


def header_lines(journal: Journal, *, width: int = 80) -> list[str]:
    """Return the header of a run as lines no wider than ``width``, as far as it is known yet."""
    lines: list[str] = []
    for what, text in _facts(journal):
        lines += fact(what, text, width=width)
    return lines


def cluster_lines(journal: Journal, *, width: int = 80) -> list[str]:
    """Return the lines of the header that need the ranks' facts: the cluster, and the limits for its GPUs."""
    return [line for what, text in _cluster_facts(journal) for line in fact(what, text, width=width)]


def fact(what: str, text: str, *, width: int) -> list[str]:
    """Return one fact of the header as lines: "gpucluster limits: H100 SXM, from thresholds.yaml"."""
    return paragraph(f"{NAME} {what}: {text}" if what else f"{NAME}: {text}", width, rest=_INDENT)


def cluster_text(journal: Journal) -> str:
    """Return "2 nodes x 8 NVIDIA H100 80GB HBM3 (H100 SXM), driver 580.95.05, CUDA 13.0, ..."; an empty
    text before the ranks are known."""
    cluster = journal.cluster
    if cluster is None or not cluster.ranks:
        return ""
    sku = journal.limits.sku if journal.limits is not None else None
    is_named = sku is not None and not journal.run.rehearsal
    return ", ".join([f"{shape_text(cluster)}{f' ({sku})' if is_named else ''}", *_software(cluster)])


def limits_text(journal: Journal) -> str:
    """Return "H100 SXM, from thresholds.yaml, overlaid by site.yaml", or that there are none for this GPU."""
    limits = journal.limits
    if limits is None:
        return ""
    files = [path for path, _ in limits.files]
    source = f"from {files[0]}" if files else "from no file"
    over = f", overlaid by {' and '.join(files[1:])}" if len(files) > 1 else ""
    if limits.sku is None:
        gpu = f"the GPU {limits.gpu_name!r}" if limits.gpu_name else "this GPU"
        return f"none: {gpu} matches no SKU {source}{over}, so nothing can be judged"
    return f"{limits.sku}, {source}{over}"


def _facts(journal: Journal) -> Iterator[tuple[str, str]]:
    run = journal.run
    shape = f"{plural(run.world_size, 'rank')} on {plural(run.nnodes, 'node')} ({launcher_text(run)})"
    remark = ", REHEARSAL: no statement about hardware" if run.rehearsal else ""
    yield "", f"{shape}, device {run.device or 'unknown'}{remark}"
    if run.merged_from:
        yield "merged", ", ".join(f"{each.run_id} of {each.started_at} ({each.verdict})" for each in run.merged_from)
    if run.merged_despite:
        yield "DIFFERENT CLUSTERS", "; ".join(run.merged_despite)
    yield from _cluster_facts(journal)
    chosen = [f"{name}={value} ({origin})" for name, (value, origin) in run.options.items() if origin != "default"]
    if chosen:
        yield "settings", ", ".join(chosen)
    profile, origin = run.options.get("profile", ("", ""))
    if run.rehearsal and origin != "default" and profile:
        yield "profile", f"cpu instead of {profile}: a rehearsal on cpu has no other profile"
    elif profile:
        yield "profile", "cpu" if run.rehearsal else profile


def launcher_text(run: Run) -> str:
    """Return the launcher: torchrun, slurm, ...; pytest where there is none."""
    if run.launcher == "single":
        return "pytest" if run.world_size == 1 else "pytest -n"
    return run.launcher or "unknown"


def _cluster_facts(journal: Journal) -> Iterator[tuple[str, str]]:
    for what, text in (("cluster", cluster_text(journal)), ("limits", limits_text(journal))):
        if text:
            yield what, text


def shape_text(cluster: Cluster) -> str:
    """Return "2 nodes x 8 NVIDIA H100", or the number of each kind where the nodes differ."""
    per_node = Counter((place.node_rank, place.host) for place in cluster.ranks)
    kinds = Counter(place.gpu.get("name", "GPU") if place.gpu else _CPU for place in cluster.ranks)
    sizes = set(per_node.values())
    nodes = plural(len(per_node), "node")
    if len(sizes) == 1 and len(kinds) == 1:
        size, kind = sizes.pop(), next(iter(kinds))
        return f"{nodes} x {size} {kind}{'s' * (size != 1 and kind == _CPU)}"
    return f"{nodes}, {len(cluster.ranks)} ranks: {' and '.join(f'{count} {kind}' for kind, count in kinds.items())}"


def _software(cluster: Cluster) -> list[str]:
    return [
        f"{name} {' and '.join(found)}"
        for key, name in _SOFTWARE.items()
        if (found := _distinct(place.versions.get(key, "") for place in cluster.ranks))
    ]


def _distinct(versions: Iterable[str]) -> list[str]:
    return [version for version in dict.fromkeys(versions) if version and version != "None"]


LEAST_WIDTH = 60
"""Narrower terminals break the lines themselves."""
QUIET, VERBOSE = -1, 1
LONG_SECONDS = 5.0
"""If all tests took less, the time table is left out."""
_MOST_NAMES = 6
_MOST_PROBLEMS = 20
_WHY_CHARACTERS = 400
_LONGEST_NAME = 100
_LONGEST_METRIC = 200
_LONGEST_PLACE = 40
_DETAIL = " " * 8
_HEADS = (
    Column(title=""),
    Column(title="test"),
    Column(title="value", is_right=True),
    Column(title="limit"),
    Column(title="unit"),
    Column(title="margin", is_right=True),
    Column(title="worst rank"),
)
_NAME, _RANK = 1, 6


def render(
    journal: Journal,
    *,
    width: int = 80,
    verbosity: int = 0,
    colour: bool = False,
    reports: Sequence[tuple[str, str]] = (),
) -> str:
    """Return a whole run as text.

    Args:
        journal: the run.
        width: columns of a line, at least ``LEAST_WIDTH``.
        verbosity: below 0 only the verdict, failures and the paths of reports; above 0 also every measurement.
        colour: add colour control sequences.
        reports: name and path of each report, such as ("journal", "run/journal.jsonl").
    """
    width = max(width, LEAST_WIDTH)
    overview = outline(journal)
    head = [] if verbosity < 0 else ["", *header_lines(journal, width=width)]
    blocks = [
        verdict_lines(overview, width=width, colour=colour) + head,
        *summary(journal, overview, width=width, verbosity=verbosity, colour=colour),
        report_lines(reports or _reports_of(journal)),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def summary(journal: Journal, overview: Outline, *, width: int, verbosity: int, colour: bool) -> Iterator[list[str]]:
    """Yield the parts between the verdict and the paths of reports, each as lines."""
    quiet, verbose = verbosity < 0, verbosity > 0
    yield _criteria(journal, overview, width=width, quiet=quiet, verbose=verbose, colour=colour)
    if not quiet:
        yield _did_not_run(overview, width=width, verbose=verbose)
        yield _tightest(journal, overview, width=width)
        yield time_lines(journal, width=width) if verbose or seconds_in_tests(journal) >= LONG_SECONDS else []
    yield _problems(journal, width=width, colour=colour)


def verdict_lines(overview: Outline, *, width: int, colour: bool) -> list[str]:
    """Return verdict, exit code and reason."""
    reason = f": {overview.reason}" if overview.reason else ""
    lines = paragraph(f"{overview.title}, exit code {overview.exit}{reason}", width)
    style = "green" if overview.is_good else "yellow" if overview.word == RUNNING else "red"
    return [styled(line, style, colour=colour) for line in lines]


def report_lines(reports: Iterable[tuple[str, str]]) -> list[str]:
    """Return the paths of reports, never broken, so that they can be copied."""
    pairs = [(f"{clean(name)}:", clean(path)) for name, path in reports]
    wide = max((columns(name) for name, _ in pairs), default=0)
    return [f"{name.ljust(wide)} {path}" for name, path in pairs]


def _reports_of(journal: Journal) -> list[tuple[str, str]]:
    return [("JUnit", journal.run.junit.path)] if journal.run.junit.path else []


# ---- the table of criteria ---------------------------------------------------------------------------------------


def _criteria(
    journal: Journal, overview: Outline, *, width: int, quiet: bool, verbose: bool, colour: bool
) -> list[str]:
    """Return a row for each test that is a criterion, measured something or failed; failures first."""
    ran = [row for row in overview.worst_first if row.outcome in WORDS and row.outcome not in ("not run", "skipped")]
    rows = [row for row in ran if not row.is_good or _is_unjudged(row) or (not quiet and _has_content(row))]
    plain = len([row for row in ran if row.is_good and not _has_content(row)])
    if not rows:
        return []
    counts = ", ".join(f"{count} {outcome}" for outcome, count in overview.counts.items())
    lines = [] if quiet else [styled(f"Criteria: {counts}", "bold", colour=colour)]
    head, table = _fitted([_cells(journal, row) for row in rows], width)
    if not quiet:
        lines.append(head)
    for row, row_lines in zip(rows, table, strict=True):
        lines += [_coloured(line, row, colour) for line in row_lines]
        if not row.is_good:
            why = clean(culprit_text(row, journal))
            lines += _detail(why if verbose else one_line(why, _WHY_CHARACTERS), width) if why else []
        if row.result is None:
            continue
        if row.is_good and _is_unjudged(row):
            lines += _detail(one_line(f"not judged: {clean(row.result.unjudged)}", _WHY_CHARACTERS), width)
        if verbose:
            lines += _properties((*measured_pairs(row.result.measurements), *row.result.properties), width)
        elif not quiet and row.result.attempts > 1:
            attempts = [pair for pair in row.result.properties if pair[0].startswith("attempt ")]
            lines += _properties([(name, one_line(text, _WHY_CHARACTERS)) for name, text in attempts], width)
    if plain and not quiet:
        lines.append(f"and {plural(plain, 'test')} passed that are no criteria and measured nothing")
    return lines


def _detail(text: str, width: int) -> list[str]:
    return paragraph(text, width, first=_DETAIL, rest=_DETAIL)


def _properties(pairs: Iterable[tuple[str, str]], width: int) -> list[str]:
    wrapped = (paragraph(f"{name}: {value}", width, first=_DETAIL, rest=f"{_DETAIL}  ") for name, value in pairs)
    return list(itertools.chain(*wrapped))


def _has_content(row: Row) -> bool:
    return row.criterion is not None or row.headline is not None


def _is_unjudged(row: Row) -> bool:
    """Whether a criterion passed without being compared with a limit, which makes the run INCOMPLETE."""
    return row.criterion is not None and row.result is not None and bool(row.result.unjudged)


def _cells(journal: Journal, row: Row) -> list[str]:
    judged, word = row.headline, WORDS[row.outcome].ljust(6)
    name = shortened(clean(display_name(row.name)), _LONGEST_NAME)
    if judged is None:
        return [word, name, "", "", "", "", ""]
    return [word, name, *_judged_cells(judged), _worst(journal, judged)]


def _judged_cells(judged: JudgedMetric) -> list[str]:
    unit = shortened(clean(judged.unit), 12)
    return [value_text(judged), shortened(bound_text(judged), 26), unit, margin_text(judged)]


def _worst(journal: Journal, judged: JudgedMetric) -> str:
    if judged.worst_rank is None:
        return ""
    place = journal.place(judged.worst_rank)
    if place is None or not place.host:
        return str(judged.worst_rank)
    gpu = f" GPU {place.gpu.get('index', '?')}" if place.gpu else ""
    return f"{judged.worst_rank} {shortened(clean(place.host + gpu), _LONGEST_PLACE)}"


def _fitted(rows: list[list[str]], width: int, *, title: str = "test") -> tuple[str, list[list[str]]]:
    """Return head and rows of a table. If it is too wide, the places of the worst ranks are dropped first."""
    heads = [replace(head, title=title) if index == _NAME else head for index, head in enumerate(_HEADS)]
    if total(widths([[head.title for head in heads], *rows])) > width:
        heads[_RANK] = replace(heads[_RANK], title="rank")
        rows = [[*row[:_RANK], row[_RANK].partition(" ")[0]] for row in rows]
    return fitted_table(heads, rows, width, name=_NAME)


def _coloured(line: str, row: Row, colour: bool) -> str:
    word = WORDS[row.outcome]
    if not line.startswith(word):
        return line
    return styled(word, STYLES.get(row.outcome, "yellow"), colour=colour) + line[len(word) :]


def measurement_table(measurements: Sequence[JudgedMetric], *, width: int = 80) -> str:
    """Return the measurements of one test as a table, failures first.

    A recorded value is left out if one of the same kind and labels is judged (algbw if busbw is); a last line has their
    number.
    """
    ordered = worst_first(measurements)
    visible = _without_siblings(ordered)
    if not visible:
        return ""
    head, rows = _fitted([_metric_cells(judged) for judged in visible], width, title="metric")
    lines = [head, *itertools.chain(*rows)]
    hidden = len(ordered) - len(visible)
    if hidden:
        lines.append(f"{plural(hidden, 'recorded value')} of the same measurements left out here")
    return "\n".join(lines)


def _metric_cells(judged: JudgedMetric) -> list[str]:
    name = shortened(clean(metric_name(judged)), _LONGEST_METRIC)
    rank = "" if judged.worst_rank is None else str(judged.worst_rank)
    return [judged.status.upper(), name, *_judged_cells(judged), rank]


def _without_siblings(measurements: Sequence[JudgedMetric]) -> list[JudgedMetric]:
    deciding = {each.metric for each in measurements if each.status != "recorded"}
    judged_keys = {_sibling_key(each) for each in measurements if each.metric in deciding}
    return [
        each
        for each in measurements
        if each.status != "recorded" or each.metric in deciding or _sibling_key(each) not in judged_keys
    ]


def _sibling_key(judged: JudgedMetric) -> tuple[str, frozenset[tuple[str, str]]]:
    return judged.metric.rpartition(".")[0], frozenset(judged.labels.items())


# ---- the rest ----------------------------------------------------------------------------------------------------


def _did_not_run(overview: Outline, *, width: int, verbose: bool) -> list[str]:
    """Return what was skipped or never reached, grouped by reason."""
    by_reason: dict[tuple[int, str], list[str]] = {}
    for row in overview.did_not_run:
        why = row.why_not_run or "no reason given"
        reason = (2, why) if row.outcome == "skipped" else (1, f"not run: {why}")
        by_reason.setdefault((0, why) if row.is_gap else reason, []).append(clean(display_name(row.name)))
    for name in overview.absent:
        by_reason.setdefault((0, "required: this run has no test for it"), []).append(clean(name))
    if not by_reason:
        return []
    count, gaps = sum(map(len, by_reason.values())), sum(len(by_reason[key]) for key in by_reason if key[0] == 0)
    # Whether a test that was never reached applies here is unknown.
    least = "at least " if any(order == 1 for order, _ in by_reason) else ""
    lines = [f"Did not run: {count}{f', {least}{gaps} of them required' if gaps else ''}"]
    for (_, why), names in sorted(by_reason.items(), key=lambda entry: entry[0][0]):
        listed = names if verbose else names[:_MOST_NAMES]
        more = f", and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
        lines += paragraph(f"{', '.join(listed)}{more}", width, first="  ", rest="  ")
        lines += paragraph(why, width, first="      ", rest="      ")
    return lines


def _tightest(journal: Journal, overview: Outline, *, width: int) -> list[str]:
    found = [(row, judged) for row, judged in overview.tightest() if (margin_ratio(judged) or 0.0) < LARGEST_MARGIN]
    if not found:
        return []
    lines = ["Tightest margins of passed values:"]
    wide = max(len(margin_text(judged)) for _, judged in found)
    for row, judged in found:
        rank = "" if judged.worst_rank is None else f", {rank_name(journal, judged.worst_rank)}"
        text = one_line(
            f"{display_name(row.name)}: {metric_name(judged)} {comparison_text(judged)}{rank}", _WHY_CHARACTERS
        )
        lines += paragraph(text, width, first=f"  {margin_text(judged).rjust(wide)}  ", rest=" " * (wide + 4))
    return lines


def _problems(journal: Journal, *, width: int, colour: bool) -> list[str]:
    messages = list(dict.fromkeys(problem.message for problem in journal.problems if problem.message != journal.reason))
    if journal.cut:
        messages.append("the last line of the journal is cut off and was ignored")
    if not messages:
        return []
    lines = [styled("Problems outside any test:", "bold", colour=colour)]
    for text in messages[:_MOST_PROBLEMS]:
        lines += [styled(line, "red", colour=colour) for line in paragraph(text, width, first="  ", rest="    ")]
    if len(messages) > _MOST_PROBLEMS:
        lines.append(f"  and {len(messages) - _MOST_PROBLEMS} more in the journal")
    return lines
