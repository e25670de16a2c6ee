"""The JSON Schema of results.json: the meaning of each key, for programs that read the file.

Draft 7, as for the YAML files. Every object is closed: no other key is ever written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.journal.records import OUTCOMES
from pytest_gpucluster.journal.verdict import (
    ACCEPTED,
    BROKEN,
    INCOMPLETE,
    PASSED_WITH_DEVIATIONS,
    REHEARSED,
    REJECTED,
    SELECTION_PASSED,
)
from pytest_gpucluster.journal.verdict import RUNNING as RUN_IN_PROGRESS
from pytest_gpucluster.metrics.sampling import STOPPED_BY
from pytest_gpucluster.reports.results_json import SCHEMA_VERSION
from pytest_gpucluster.reports.summary import IN_PROGRESS, NOT_RUN, RUNNING

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
STATUSES = ("passed", "failed", "error", "recorded")
WORDS = (ACCEPTED, SELECTION_PASSED, PASSED_WITH_DEVIATIONS, REHEARSED, REJECTED, INCOMPLETE, BROKEN, RUN_IN_PROGRESS)


def results_schema() -> Schema:
    """Return the schema of results.json."""
    return {
        "$schema": DRAFT,
        "title": "Results of pytest-gpucluster",
        **_keys(
            "A run: verdict, measurements, and what they were made with.",
            schema_version={
                "const": SCHEMA_VERSION,
                "description": "Raised when a key changes its meaning or goes away. A new key does not raise it.",
            },
            verdict=_verdict(),
            run=_run(),
            cluster=_keys(
                "The ranks that reported, and what was inconsistent between them.",
                ranks=_list("One entry per rank.", _rank()),
                problems=_list("Inconsistencies found before the first test.", _text("One problem.")),
            ),
            limits=_or_null(
                _keys(
                    "The limits in force; null if the run ended before they were read.",
                    sku=_text_or_null("The SKU whose limits apply; null if there are none for this GPU."),
                    gpu_name=_text_or_null("The GPU's name as reported by NVML; null on cpu."),
                    files=_list(
                        "The files of limits, later ones overlaying earlier ones.",
                        _keys(
                            "A file.",
                            path=_text("Its path."),
                            sha256=_text("The SHA-256 of its content; empty if it could not be read again."),
                        ),
                    ),
                )
            ),
            environment=_or_null(
                _keys(
                    "The system of the first rank; null if the run ended before it was known.",
                    host=_text("The host."),
                    system=_text("Distribution, kernel and architecture."),
                    cpus={"type": ["integer", "null"], "description": "Its CPUs."},
                    variables=_texts("Environment variables that influence measurements, by name."),
                )
            ),
            workload=_or_null(
                _keys(
                    "Sizes, shapes and times; null if the suite has none.",
                    profile=_text("The profile, such as full."),
                    file=_text("The file that sets it."),
                    values=_map(
                        "Each value by its key.",
                        _keys("A value.", value=_text("The value as written."), origin=_text("Its origin.")),
                    ),
                )
            ),
            tests=_list("Every test in the order of the run; those that did not run come last.", _test()),
            not_run=_list(
                "The tests that were skipped or never reached.",
                _keys(
                    "A test.",
                    nodeid=_text("pytest's id."),
                    name=_text("function[parameters]."),
                    criterion=_text_or_null("Its criterion; null for a test that is none."),
                    outcome={"enum": ["skipped", NOT_RUN], "description": "Skipped, or never reached."},
                    why=_text("Why, in one line."),
                ),
            ),
            tightest=_list(
                "The passed values with the smallest margins, smallest first.",
                _keys(
                    "A value.",
                    nodeid=_text("The test that measured it."),
                    measurement=_count("Its index in the test's measurements, from 0."),
                    margin=_number("Its margin, a ratio of the limit."),
                ),
            ),
            problems=_list(
                "Problems outside of any test.",
                _keys(
                    "A problem.",
                    name=_text("Its kind, such as rank lost."),
                    outcome={"enum": ["error", "failed"], "description": "failed: the hardware is the cause."},
                    message=_text("One line."),
                    text=_text("All that is known about it."),
                ),
            ),
            properties=_list("Properties that the suite recorded for the run.", _named()),
            links=_keys(
                "Other files in the run's folder.",
                journal=_text("The source of this file. It also has the samples."),
                artifacts=_text("The folder of the tests' files."),
            ),
        ),
    }


def _verdict() -> Schema:
    return _keys(
        "The verdict.",
        word=_text(f"The verdict: {', '.join(WORDS[:-1])} or {WORDS[-1]}."),
        exit=_integer("Its exit code."),
        reason=_text("Why, in one line."),
        accepted={
            "type": "boolean",
            "description": "True only if the verdict is ACCEPTED: not for a rehearsal or a selection, "
            "whose exit code is 0 too.",
        },
        rehearsal={"type": "boolean", "description": "True on cpu: no statement about hardware."},
        counts=_map("Number of tests by outcome; without zeros.", _count("Tests.")),
    )


def _run() -> Schema:
    return _keys(
        "What ran, where and when.",
        run_id=_text("The launcher's id of the run."),
        started_at=_text("ISO 8601."),
        ended_at=_text_or_null("ISO 8601; null if the run was cut off."),
        seconds=_number("Its duration, as far as it is known."),
        closed_by=_text_or_null("Who closed the journal: rank 0, or the recorder after its end; null if it is open."),
        cut={"type": "boolean", "description": "True if the journal's last line was cut off and ignored."},
        merged_from=_list(
            "The runs that were merged into this one, the oldest first; empty if it was not merged.",
            _keys(
                "A run.",
                journal=_text("The path of its journal."),
                sha256=_text("The journal's SHA-256."),
                run_id=_text("The launcher's id of the run."),
                started_at=_text("ISO 8601."),
                verdict=_text("Its verdict."),
                exit=_integer("Its exit code."),
            ),
        ),
        merged_despite=_list("Differences between the clusters of merged runs.", _text("One difference.")),
        hostname=_text("The host of rank 0."),
        launcher=_text("The launcher, such as torchrun."),
        device=_text("cuda or cpu."),
        selection={"type": "boolean", "description": "True if only a part of the suite was selected."},
        deviations=_list(
            "Where limits or workload were weaker than the shipped ones, or a test passed after a miss.",
            _text("One deviation."),
        ),
        world_size=_integer("Ranks."),
        nnodes=_integer("Nodes."),
        argv=_list("pytest's arguments.", _text("One argument.")),
        options=_map(
            "The settings of this plugin.",
            _keys("A setting.", value=_text("Its value."), origin=_text("Its origin.")),
        ),
        versions=_texts("Versions on rank 0, by name."),
        plugin_version=_text("The version of pytest-gpucluster that wrote the journal."),
    )


def _rank() -> Schema:
    return _keys(
        "A rank.",
        rank=_integer("Its number."),
        host=_text("Its host."),
        local_rank=_integer("Its number on its node."),
        node_rank=_integer("The number of its node."),
        gpu=_or_null(_texts("Its GPU: index, uuid, pci_bus_id, name, serial, vbios and more, as text; null on cpu.")),
        versions=_texts("Versions on this rank, by name."),
    )


def _test() -> Schema:
    return _keys(
        "A test, merged over all ranks.",
        nodeid=_text("pytest's id."),
        name=_text("function[parameters]."),
        criterion=_text_or_null("Its criterion; null for a test that is none."),
        outcome={
            "enum": [*OUTCOMES, RUNNING, IN_PROGRESS, NOT_RUN],
            "description": "passed; failed: a limit missed or a wrong result; error: it broke; skipped; running: the "
            "run ended in it; not run: the run ended before it. While a run is RUNNING its current test is in "
            "progress, and later ones are not run.",
        },
        message=_text("One line: the failure, or why it did not run."),
        text=_text("The failure's full text."),
        phase=_text_or_null("The phase that decided: setup, call or teardown; null if it has no result."),
        xfail=_text_or_null("Why it was expected to fail; null if it was not."),
        attempts=_integer("Number of attempts."),
        applicable={
            "type": "boolean",
            "description": "False if the declared topology has too few ranks or nodes for it.",
        },
        unjudged=_text("Why its values, or its rates, were not judged although they should be; else empty."),
        started_at=_text_or_null("ISO 8601; null if it was not started."),
        seconds=_number("Its duration, with setup and teardown."),
        spent=_or_null(
            _keys(
                "Its time by parts, over all attempts; null if not recorded.",
                **{part: _part_of_time(what) for part, what in _PARTS_OF_TIME.items()},
            )
        ),
        headline={
            "type": ["integer", "null"],
            "minimum": 0,
            "description": "The index of the deciding measurement: the miss that explains the others, "
            "else the one with the least margin.",
        },
        measurements=_list("All its measurements.", _measurement()),
        ranks=_list(
            "Reports of ranks that did more than pass.",
            _keys(
                "A rank.",
                rank=_integer("Its number."),
                outcome=_text("passed, failed, error, skipped, lost or hung."),
                message=_text("Its message, in one line."),
            ),
        ),
        culprits=_list("The ranks that are the cause.", _integer("A rank.")),
        released=_list("Ranks that only waited for a culprit and were released.", _integer("A rank.")),
        isolation=_or_null(_isolation()),
        properties=_list("The test's own properties.", _named()),
        artifacts=_text("The folder of its files, relative to this file; it exists only if the test wrote any."),
    )


_PARTS_OF_TIME = {
    "set_up": "pytest's setup phase: fixtures.",
    "warm_up": "Work before the measurement.",
    "measuring": "The measurement, including waiting for other ranks.",
    "verifying": "Verification of results.",
    "agreeing": "The exchanges of all ranks that end a phase, including waiting for slower ranks.",
    "other": "The rest.",
}


def _part_of_time(what: str) -> Schema:
    return _keys(
        what,
        seconds=_number("On the first rank; its parts add up to the whole test."),
        most_seconds=_number("The maximum of all ranks. The others report theirs after teardown."),
        most_rank=_integer("The first rank with that maximum."),
    )


def _limit(what: str) -> Schema:
    return _keys(
        what,
        min=_optional("Lower limit for every rank."),
        max=_optional("Upper limit for every rank."),
        min_ratio_to_median=_optional("Lower limit for each rank as a ratio of the median of the others."),
        expected=_optional("The value of a good system: shown next to the limit, never judged."),
        expect_transport=_or_null(
            {
                "type": "array",
                "items": _text("A transport."),
                "description": "The allowed transports; null: any.",
            }
        ),
        source=_text("The source of the numbers."),
        origin=_text("File and line of the limit."),
    )


def _measurement() -> Schema:
    return _keys(
        "A metric with one set of labels, over all ranks.",
        metric=_text("Its name, such as nccl.all_reduce.busbw."),
        labels=_texts("What distinguishes it from others of its name, such as the size."),
        unit=_text("The unit of value, interval, limit, peak, median, mean and values."),
        better={"enum": ["higher", "lower", None], "description": "Which values are better; null if unknown."},
        status={
            "enum": list(STATUSES),
            "description": "passed or failed against its limit; error: it could not be judged; recorded: not to "
            "be judged.",
        },
        reason=_text("Why it failed or could not be judged."),
        inconclusive=_text("Why the value cannot be distinguished from its limit; empty if it can."),
        stopped=_or_null(
            _keys(
                "Why sampling on the worst rank ended; null if it took no samples, or in an older journal.",
                by={
                    "enum": list(STOPPED_BY),
                    "description": "interval: the 95 % interval of the median was narrow enough; time: the time and "
                    "its extension were used up; samples: there were no more to take.",
                },
                samples=_integer("Number of samples."),
                seconds=_number("Their total duration; 0 if they were not taken for this."),
                width_ratio=_number("Width of the interval as a ratio of the median."),
                allowed_ratio=_number("The allowed width."),
                extended={
                    "type": "boolean",
                    "description": "Whether sampling was extended beyond its time.",
                },
            )
        ),
        value=_optional("The worst rank's value, which decides; null if there is none."),
        interval=_or_null(
            {
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "items": _number("An end."),
                "description": "The 95 % confidence interval of the value; null if unknown.",
            }
        ),
        worst=_or_null(
            _keys(
                "Where that value was measured; null if no rank stands out.",
                rank=_integer("The rank."),
                host=_text_or_null("Its host."),
                gpu_uuid=_text_or_null("Its GPU."),
            )
        ),
        limit=_or_null(_limit("The limit; null if none applies.")),
        shipped_limit=_or_null(
            _limit("The shipped limit, if the site's file has a weaker one with its own source; else null.")
        ),
        margin=_optional("The margin as a ratio of the limit; negative: missed. For a limit of zero the distance."),
        peak=_optional("The data sheet's peak for this value."),
        peak_ratio=_optional("The value as a ratio of the peak."),
        median=_optional("The median of all ranks."),
        mean=_optional("The mean of all ranks."),
        ratio_to_median=_optional("The lowest rank over the median of the others."),
        values=_map("Each rank's value by its number.", _number("A value.")),
        baseline=_or_null(
            _keys(
                "The comparison with the baseline, for the worst rank; null without a baseline.",
                kind=_text("better, worse, within noise and the like (docs/compare.md)."),
                old=_optional("The baseline's value."),
                old_rank={"type": ["integer", "null"], "description": "The rank there."},
                rank={"type": ["integer", "null"], "description": "The rank here."},
                matched_by=_text("How the two ranks were matched."),
                change_ratio=_optional("The change; positive is better."),
                allowed_ratio=_optional("The allowed change for the worse."),
                decides={"type": "boolean", "description": "Whether it can fail the test."},
                why=_text("An explanation."),
            )
        ),
        telemetry=_text("Telemetry of the worst rank's GPU during the measurement; empty if unknown."),
    )


def _isolation() -> Schema:
    return _keys(
        "The result of the search for culprits; null if there was none.",
        culprits=_list(
            "Confirmed by further probes with known-good partners.",
            _keys(
                "A node, a GPU, or the link between two.",
                names=_list("Its name; of a link both ends.", _text("A name.")),
                kind=_text("unit or link."),
                failed={"type": ["integer", "null"], "description": "Number of probes with it that failed."},
                probes={"type": ["integer", "null"], "description": "Number of probes with it."},
                evidence=_list("The evidence.", _text("One line.")),
            ),
        ),
        cleared=_list("Those that passed with others.", _text("A name.")),
        undecided=_list("The rest.", _text("A name.")),
        why_undecided=_text("Why the rest is undecided."),
        reproduced={"type": "boolean", "description": "Whether the fault was reproduced."},
        cut_short=_text("Why the search ended early; empty if it did not."),
    )


def _keys(description: str, /, **properties: Mapping[str, Any]) -> Schema:
    """Return the schema of an object that has all of these keys and no other."""
    return {
        "description": description,
        "type": "object",
        "additionalProperties": False,
        "required": list(properties),
        "properties": properties,
    }


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _list(description: str, item: Schema) -> Schema:
    return {"description": description, "type": "array", "items": item}


def _map(description: str, value: Schema) -> Schema:
    return {"description": description, "type": "object", "additionalProperties": value}


def _texts(description: str) -> Schema:
    return _map(description, _text("A value."))


def _named() -> Schema:
    return {
        "description": "Name and value.",
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": _text("The name, then the value."),
    }


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _text_or_null(description: str) -> Schema:
    return {"type": ["string", "null"], "description": description}


def _integer(description: str) -> Schema:
    return {"type": "integer", "description": description}


def _count(description: str) -> Schema:
    return {"type": "integer", "minimum": 0, "description": description}


_NO_NUMBERS = ["NaN", "Infinity", "-Infinity"]


def _number(description: str) -> Schema:
    return {"anyOf": [{"type": "number"}, {"enum": _NO_NUMBERS}], "description": description}


def _optional(description: str) -> Schema:
    return {"anyOf": [{"type": ["number", "null"]}, {"enum": _NO_NUMBERS}], "description": description}
