"""results.json: verdict and measurements, for programs; and its JSON Schema, docs/results.schema.json.

Both follow from one definition at the end of this module: each key with its type, its description and, unless it is the
attribute of that name, how its value is found. Every object is closed: no other key is ever written.

The order of keys is fixed, and tests have the order of the run, so two files can be compared line by line. JSON has no
NaN and no infinity: they are the texts "NaN", "Infinity" and "-Infinity", as in the journal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import OUTCOMES, REHEARSAL, SIMULATED, RankPlace, TestResult
from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name
from pytest_gpucluster.journal.verdict import RUNNING as RUN_IN_PROGRESS
from pytest_gpucluster.journal.verdict import VERDICTS
from pytest_gpucluster.metrics.codec import number_to_json
from pytest_gpucluster.metrics.sampling import STOPPED_BY
from pytest_gpucluster.metrics.time_budget import PARTS
from pytest_gpucluster.reports import summary
from pytest_gpucluster.reports.findings import baseline_of, isolation_of
from pytest_gpucluster.reports.tables import worst_telemetry

SCHEMA_VERSION = 1
"""Raised when a key changes its meaning or goes away; a new key does not raise it."""

Schema = dict[str, Any]
Get = str | Callable[[Any, Journal], Any]
"""Where an object's key has its value: the name of an attribute, such as "gpu.uuid" or "journal.end.at", which is null
where a part of it is None; or a function of the object and the journal."""


def render(journal: Journal) -> str:
    """Return results.json of a run, also of one that was cut off. It is ASCII."""
    return json.dumps(document(journal), indent=2, allow_nan=False) + "\n"


def document(journal: Journal) -> dict[str, Any]:
    """Return results.json as plain JSON types."""
    results: dict[str, Any] = _RESULTS.convert(summary.outline(journal), journal)
    return results


def results_schema() -> Schema:
    """Return the JSON Schema of results.json, draft 7 like those of the YAML files."""
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Results of pytest-gpucluster"}
    return {**head, **_RESULTS.schema}


# ---- types -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Type:
    """A JSON type: its schema, the conversion of a Python value, and where the enclosing object has the value."""

    schema: Schema
    convert: Callable[[Any, Journal], Any] = lambda value, journal: value
    get: Get | None = None
    """None: the attribute with the key's name."""


def _scalar(kind: str | list[str], description: str, get: Get | None = None, **more: object) -> _Type:
    return _Type(schema={"type": kind, **more, "description": description}, get=get)


_text = partial(_scalar, "string")
_text_or_null = partial(_scalar, ["string", "null"])
_integer = partial(_scalar, "integer")
_integer_or_null = partial(_scalar, ["integer", "null"])
_flag = partial(_scalar, "boolean")


def _number(description: str, get: Get | None = None, *, kind: str | list[str] = "number") -> _Type:
    schema = {"anyOf": [{"type": kind}, {"enum": ["NaN", "Infinity", "-Infinity"]}], "description": description}
    return _Type(schema=schema, convert=lambda value, _: None if value is None else number_to_json(value), get=get)


_number_or_null = partial(_number, kind=["number", "null"])


def _choice(values: Sequence[str | None], description: str, get: Get | None = None) -> _Type:
    return _Type(schema={"enum": list(values), "description": description}, get=get)


def _list(description: str, item: _Type, get: Get | None = None, *, length: int | None = None) -> _Type:
    bounds = {} if length is None else {"minItems": length, "maxItems": length}
    return _Type(
        schema={"description": description, "type": "array", **bounds, "items": item.schema},
        convert=lambda values, journal: [item.convert(value, journal) for value in values],
        get=get,
    )


def _map(description: str, item: _Type, get: Get | None = None) -> _Type:
    return _Type(
        schema={"description": description, "type": "object", "additionalProperties": item.schema},
        convert=lambda values, journal: {str(key): item.convert(value, journal) for key, value in values.items()},
        get=get,
    )


def _texts(description: str, get: Get | None = None) -> _Type:
    return _map(description, _text("A value."), get)


def _properties(description: str, get: Get | None = None) -> _Type:
    return _list(description, _list("Name and value.", _text("The name, then the value."), length=2), get)


def _object(description: str, get: Get | None = None, /, **keys: _Type) -> _Type:
    return _Type(
        schema={
            "description": description,
            "type": "object",
            "additionalProperties": False,
            "required": list(keys),
            "properties": {name: key.schema for name, key in keys.items()},
        },
        convert=lambda source, journal: {
            name: key.convert(_value(source, journal, name if key.get is None else key.get), journal)
            for name, key in keys.items()
        },
        get=get,
    )


def _or_null(inner: _Type) -> _Type:
    return replace(
        inner,
        schema={**inner.schema, "type": [inner.schema["type"], "null"]},
        convert=lambda value, journal: None if value is None else inner.convert(value, journal),
    )


def _object_or_null(description: str, get: Get | None = None, /, **keys: _Type) -> _Type:
    return _or_null(_object(description, get, **keys))


def _value(source: Any, journal: Journal, get: Get) -> Any:
    if not isinstance(get, str):
        return get(source, journal)
    source = {"journal": journal} if get.startswith("journal.") else source
    first, *names = get.split(".")
    found = source[first] if isinstance(source, Mapping) else getattr(source, first)
    for name in names:
        if found is not None:
            found = found.get(name) if isinstance(found, Mapping) else getattr(found, name)
    return found


# ---- values ------------------------------------------------------------------------------------------------------


def _test_values(row: summary.Row, journal: Journal) -> dict[str, Any]:
    result = row.result or TestResult(nodeid=row.nodeid, outcome="error", phase="")
    headline = [number for number, each in enumerate(result.measurements) if each is row.headline]
    started = result.started_at
    if row.result is None and journal.running is not None and journal.running.nodeid == row.nodeid:
        started = journal.running.at
    return vars(result) | {
        "name": row.name,
        "criterion": row.criterion,
        "outcome": row.outcome,
        "message": result.message or row.why,
        "phase": result.phase or None,
        "started_at": started or None,
        "spent": result.spent if result.spent.keys() >= set(PARTS) else None,
        "headline": headline[0] if headline else None,
        "isolation": isolation_of(result.isolation),
        "artifacts": f"{ARTIFACTS}/{artifacts_name(row.nodeid)}",
    }


# ---- the definition ----------------------------------------------------------------------------------------------


def _limit(description: str, get: Get) -> _Type:
    return _object_or_null(
        description,
        get,
        min=_number_or_null("Lower limit for every rank."),
        max=_number_or_null("Upper limit for every rank."),
        min_ratio_to_median=_number_or_null("Lower limit for each rank as a ratio of the median of the others."),
        expected=_number_or_null("The value of a good system: shown next to the limit, never judged."),
        expect_transport=_or_null(_list("The allowed transports; null: any.", _text("A transport."))),
        source=_text("The source of the numbers."),
        origin=_text("File and line of the limit."),
    )


_MEASUREMENT = _object(
    "A metric with one set of labels, over all ranks.",
    metric=_text("Its name, such as nccl.all_reduce.busbw."),
    labels=_texts("What distinguishes it from others of its name, such as the size."),
    unit=_text("The unit of value, interval, limit, peak, median, mean and values."),
    better=_choice(
        ("higher", "lower", None),
        "Which values are better; null if unknown.",
        lambda judged, _: {True: "higher", False: "lower", None: None}[summary.is_better_higher(judged)],
    ),
    status=_choice(
        tuple(summary.STATUS_ORDER),
        "passed or failed against its limit; error: it could not be judged; recorded: not to be judged.",
    ),
    reason=_text("Why it failed or could not be judged."),
    inconclusive=_text("Why the value cannot be distinguished from its limit; empty if it can."),
    stopped=_object_or_null(
        "Why sampling on the worst rank ended; null if it took no samples, or in an older journal.",
        by=_choice(
            STOPPED_BY,
            "interval: the 95 % interval of the median was narrow enough; time: the time and its extension were "
            "used up; samples: there were no more to take.",
        ),
        samples=_integer("Number of samples."),
        seconds=_number("Their total duration; 0 if they were not taken for this."),
        width_ratio=_number("Width of the interval as a ratio of the median."),
        allowed_ratio=_number("The allowed width."),
        extended=_flag("Whether sampling was extended beyond its time."),
    ),
    value=_number_or_null("The worst rank's value, which decides; null if there is none."),
    interval=_or_null(
        _list("The 95 % confidence interval of the value; null if unknown.", _number("An end."), length=2)
    ),
    worst=_object_or_null(
        "Where that value was measured; null if no rank stands out.",
        lambda judged, journal: (
            None if judged.worst_rank is None else journal.place(judged.worst_rank) or RankPlace(rank=judged.worst_rank)
        ),
        rank=_integer("The rank."),
        host=_text_or_null("Its host.", lambda place, _: place.host or None),
        gpu_uuid=_text_or_null("Its GPU.", "gpu.uuid"),
    ),
    limit=_limit("The limit; null if none applies.", "limit"),
    shipped_limit=_limit(
        "The shipped limit, if the site's file has a weaker one with its own source; else null.", "shipped"
    ),
    margin=_number_or_null("The margin as a ratio of the limit; negative: missed. For a limit of zero the distance."),
    peak=_number_or_null("The data sheet's peak for this value.", lambda judged, _: summary.peak_value(judged)),
    peak_ratio=_number_or_null("The value as a ratio of the peak."),
    median=_number_or_null("The median of all ranks."),
    mean=_number_or_null("The mean of all ranks."),
    ratio_to_median=_number_or_null("The lowest rank over the median of the others."),
    values=_map("Each rank's value by its number.", _number("A value.")),
    baseline=_object_or_null(
        "The comparison with the baseline, for the worst rank; null without a baseline.",
        lambda judged, _: baseline_of(judged.baseline),
        kind=_text("better, worse, within noise and the like (docs/compare.md)."),
        old=_number_or_null("The baseline's value.", "old.value"),
        old_rank=_integer_or_null("The rank there."),
        rank=_integer_or_null("The rank here."),
        matched_by=_text("How the two ranks were matched."),
        change_ratio=_number_or_null("The change; positive is better."),
        allowed_ratio=_number_or_null("The allowed change for the worse."),
        decides=_flag("Whether it can fail the test."),
        why=_text("An explanation."),
    ),
    telemetry=_text(
        "Telemetry of the worst rank's GPU during the measurement; empty if unknown.",
        lambda judged, _: worst_telemetry(judged),
    ),
)

_SPENT = {
    "set_up": "pytest's setup phase: fixtures.",
    "warm_up": "Work before the measurement.",
    "measuring": "The measurement, including waiting for other ranks.",
    "verifying": "Verification of results.",
    "agreeing": "The exchanges of all ranks that end a phase, including waiting for slower ranks.",
    "other": "The rest.",
}

_TEST = _object(
    "A test, merged over all ranks.",
    nodeid=_text("pytest's id."),
    name=_text("function[parameters]."),
    criterion=_text_or_null("Its criterion; null for a test that is none."),
    outcome=_choice(
        (*OUTCOMES, summary.RUNNING, summary.IN_PROGRESS, summary.NOT_RUN),
        "passed; failed: a limit missed or a wrong result; error: it broke; skipped; running: the run ended in it; not "
        "run: the run ended before it. While a run is RUNNING its current test is in progress, and later ones are not "
        "run.",
    ),
    message=_text("One line: the failure, or why it did not run."),
    text=_text("The failure's full text."),
    phase=_text_or_null("The phase that decided: setup, call or teardown; null if it has no result."),
    xfail=_text_or_null("Why it was expected to fail; null if it was not.", "wasxfail"),
    attempts=_integer("Number of attempts."),
    applicable=_flag("False if the declared topology has too few ranks or nodes for it."),
    unjudged=_text("Why its values, or its rates, were not judged although they should be; else empty."),
    started_at=_text_or_null("ISO 8601; null if it was not started."),
    seconds=_number("Its duration, with setup and teardown.", "duration_seconds"),
    spent=_object_or_null(
        "Its time by parts, over all attempts; null if not recorded.",
        **{
            part: _object(
                description,
                seconds=_number("On the first rank; its parts add up to the whole test."),
                most_seconds=_number("The maximum of all ranks. The others report theirs after teardown."),
                most_rank=_integer("The first rank with that maximum."),
            )
            for part, description in _SPENT.items()
        },
    ),
    headline=_integer_or_null(
        "The index of the deciding measurement: the miss that explains the others, else the one with the least margin.",
        minimum=0,
    ),
    measurements=_list("All its measurements.", _MEASUREMENT),
    ranks=_list(
        "Reports of ranks that did more than pass.",
        _object(
            "A rank.",
            rank=_integer("Its number."),
            outcome=_text("passed, failed, error, skipped, lost or hung."),
            message=_text("Its message, in one line."),
        ),
    ),
    culprits=_list("The ranks that are the cause.", _integer("A rank.")),
    released=_list("Ranks that only waited for a culprit and were released.", _integer("A rank.")),
    isolation=_object_or_null(
        "The result of the search for culprits; null if there was none.",
        culprits=_list(
            "Confirmed by further probes with known-good partners.",
            _object(
                "A node, a GPU, or the link between two.",
                names=_list("Its name; of a link both ends.", _text("A name.")),
                kind=_text("unit or link."),
                failed=_integer_or_null("Number of probes with it that failed."),
                probes=_integer_or_null("Number of probes with it."),
                evidence=_list("The evidence.", _text("One line.")),
            ),
            lambda search, _: [vars(each) | {"names": search.named(each.units)} for each in search.culprits],
        ),
        cleared=_list(
            "Those that passed with others.", _text("A name."), lambda search, _: search.named(search.cleared)
        ),
        undecided=_list("The rest.", _text("A name."), lambda search, _: search.named(search.undecided)),
        why_undecided=_text("Why the rest is undecided."),
        reproduced=_flag("Whether the fault was reproduced."),
        cut_short=_text("Why the search ended early; empty if it did not."),
    ),
    properties=_properties("The test's own properties."),
    artifacts=_text("The folder of its files, relative to this file; it exists only if the test wrote any."),
)

_RUN = _object(
    "What ran, where and when.",
    "journal.run",
    run_id=_text("The launcher's id of the run."),
    started_at=_text("ISO 8601."),
    ended_at=_text_or_null("ISO 8601; null if the run was cut off.", "journal.end.at"),
    seconds=_number("Its duration, as far as it is known.", lambda _, journal: summary.run_seconds(journal)),
    closed_by=_text_or_null(
        "Who closed the journal: rank 0, or the recorder after its end; null if it is open.",
        "journal.end.by",
    ),
    cut=_flag("True if the journal's last line was cut off and ignored.", "journal.cut"),
    merged_from=_list(
        "The runs that were merged into this one, the oldest first; empty if it was not merged.",
        _object(
            "A run.",
            journal=_text("The path of its journal."),
            sha256=_text("The journal's SHA-256."),
            run_id=_text("The launcher's id of the run."),
            started_at=_text("ISO 8601."),
            verdict=_text("Its verdict."),
            exit=_integer("Its exit code."),
        ),
    ),
    hostname=_text("The host of rank 0."),
    launcher=_text("The launcher, such as torchrun."),
    device=_text("cuda or cpu."),
    selection=_flag("True if only a part of the suite was selected."),
    deviations=_list(
        "Where limits or workload were weaker than the shipped ones, or a test passed after a miss.",
        _text("One deviation."),
        "journal.deviations",
    ),
    world_size=_integer("Ranks."),
    nnodes=_integer("Nodes."),
    argv=_list("pytest's arguments.", _text("One argument.")),
    options=_map(
        "The settings of this plugin.",
        _object(
            "A setting.",
            value=_text("Its value.", lambda setting, _: setting[0]),
            origin=_text("Its origin.", lambda setting, _: setting[1]),
        ),
    ),
    versions=_texts("Versions on rank 0, by name."),
    plugin_version=_text("The version of pytest-gpucluster that wrote the journal."),
)

_RESULTS = _object(
    "A run: verdict, measurements, and what they were made with.",
    schema_version=_Type(
        schema={
            "const": SCHEMA_VERSION,
            "description": "Raised when a key changes its meaning or goes away. A new key does not raise it.",
        },
        get=lambda *_: SCHEMA_VERSION,
    ),
    verdict=_object(
        "The verdict.",
        lambda run, _: run,
        word=_text(f"The verdict: {', '.join(VERDICTS)} or {RUN_IN_PROGRESS}."),
        exit=_integer("Its exit code."),
        reason=_text("Why, in one line."),
        accepted=_flag(
            "True only if the verdict is ACCEPTED: not for a rehearsal, a simulated cluster or a selection, whose exit"
            " code is 0 too.",
            "is_accepted",
        ),
        rehearsal=_flag("True on cpu: no statement about hardware.", lambda run, _: run.kind == REHEARSAL),
        simulated=_flag(
            "True on a simulated cluster: no statement about hardware.", lambda run, _: run.kind == SIMULATED
        ),
        counts=_map("Number of tests by outcome; without zeros.", _integer("Tests.", minimum=0)),
    ),
    run=_RUN,
    cluster=_object(
        "The ranks that reported, and what was inconsistent between them.",
        lambda _, journal: {"ranks": (), "problems": ()} if journal.cluster is None else journal.cluster,
        ranks=_list(
            "One entry per rank.",
            _object(
                "A rank.",
                rank=_integer("Its number."),
                host=_text("Its host."),
                local_rank=_integer("Its number on its node."),
                node_rank=_integer("The number of its node."),
                gpu=_or_null(
                    _texts(
                        "Its GPU: index, uuid, pci_bus_id, name, serial, vbios and more, as text; null on cpu.",
                        lambda place, _: place.gpu or None,
                    )
                ),
                versions=_texts("Versions on this rank, by name."),
            ),
        ),
        problems=_list("Inconsistencies found before the first test.", _text("One problem.")),
    ),
    limits=_object_or_null(
        "The limits in force; null if the run ended before they were read.",
        "journal.limits",
        sku=_text_or_null("The SKU whose limits apply; null if there are none for this GPU."),
        gpu_name=_text_or_null("The GPU's name as reported by NVML; null on cpu."),
        files=_list(
            "The files of limits, later ones overlaying earlier ones.",
            _object(
                "A file.",
                path=_text("Its path."),
                sha256=_text("The SHA-256 of its content; empty if it could not be read again."),
            ),
        ),
    ),
    environment=_object_or_null(
        "The system of the first rank; null if the run ended before it was known.",
        "journal.environment",
        host=_text("The host."),
        system=_text("Distribution, kernel and architecture."),
        cpus=_integer_or_null("Its CPUs."),
        variables=_texts("Environment variables that influence measurements, by name."),
    ),
    workload=_object_or_null(
        "Sizes, shapes and times; null if the suite has none.",
        "journal.workload",
        profile=_text("The profile, such as full."),
        file=_text("The file that sets it."),
        values=_map(
            "Each value by its key.",
            _object("A value.", value=_text("The value as written."), origin=_text("Its origin.")),
            lambda workload, _: {
                key: {"value": value, "origin": workload.origins.get(key, "")} for key, value in workload.values.items()
            },
        ),
    ),
    tests=_list(
        "Every test in the order of the run; those that did not run come last.",
        _TEST,
        lambda run, journal: [_test_values(row, journal) for row in run.rows],
    ),
    problems=_list(
        "Problems outside of any test.",
        _object(
            "A problem.",
            name=_text("Its kind, such as rank lost."),
            outcome=_choice(("error", "failed"), "failed: the hardware is the cause."),
            message=_text("One line."),
            text=_text("All that is known about it."),
        ),
        "journal.problems",
    ),
    properties=_properties("Properties that the suite recorded for the run.", "journal.properties"),
)
