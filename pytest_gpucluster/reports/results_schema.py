"""The JSON Schema of results.json: what each key means, for programs that read the file.

Draft 7, as for the YAML files. Every object is closed: a key that is not described here is never written.
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
from pytest_gpucluster.journal.verdict import RUNNING as RUN_GOES_ON
from pytest_gpucluster.metrics.sampling import STOPPED_BY
from pytest_gpucluster.reports.results_json import SCHEMA_VERSION
from pytest_gpucluster.reports.summary import IN_PROGRESS, NOT_RUN, RUNNING

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
STATUSES = ("passed", "failed", "error", "recorded")
WORDS = (ACCEPTED, SELECTION_PASSED, PASSED_WITH_DEVIATIONS, REHEARSED, REJECTED, INCOMPLETE, BROKEN, RUN_GOES_ON)


def results_schema() -> Schema:
    """Return the schema of results.json."""
    return {
        "$schema": DRAFT,
        "title": "Results of pytest-gpucluster",
        **_keys(
            "A run: its verdict, what was measured, and with what.",
            schema_version={
                "const": SCHEMA_VERSION,
                "description": "Raised when a key changes its meaning or goes away. A new key does not raise it.",
            },
            verdict=_verdict(),
            run=_run(),
            cluster=_keys(
                "Every rank that has reported, and what was wrong with them together.",
                ranks=_list("One entry a rank.", _rank()),
                problems=_list("What did not fit together before the first test.", _text("One problem.")),
            ),
            limits=_or_null(
                _keys(
                    "The limits in force; null where the run ended before they were read.",
                    sku=_text_or_null("The SKU whose limits apply. null: no limits are known for this GPU."),
                    gpu_name=_text_or_null("The GPU's name as NVML tells it; null on cpu."),
                    files=_list(
                        "The files of limits, later ones overlaying earlier ones.",
                        _keys(
                            "A file.",
                            path=_text("Where it was."),
                            sha256=_text("The digest of its content; empty where it could not be read again."),
                        ),
                    ),
                )
            ),
            environment=_or_null(
                _keys(
                    "Where the first rank ran; null where the run ended before that was known.",
                    host=_text("The host."),
                    system=_text("Distribution, kernel and architecture."),
                    cpus={"type": ["integer", "null"], "description": "Its CPUs."},
                    variables=_texts("Variables that change what is measured, by name."),
                )
            ),
            workload=_or_null(
                _keys(
                    "Sizes, shapes and times; null where the suite has none.",
                    profile=_text("The profile, such as full."),
                    file=_text("The file that sets it."),
                    values=_map(
                        "Each value by its key.",
                        _keys("A value.", value=_text("The value as written."), origin=_text("Where it was set.")),
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
                    criterion=_text_or_null("The criterion that it is; null for a test that is none."),
                    outcome={"enum": ["skipped", NOT_RUN], "description": "Skipped, or never reached."},
                    why=_text("Why, in one line."),
                ),
            ),
            tightest=_list(
                "The values that kept their limit by the smallest share, the nearest first.",
                _keys(
                    "A value.",
                    nodeid=_text("The test that measured it."),
                    measurement=_count("Its place among the test's measurements, from 0."),
                    margin=_number("Its margin, a ratio of the limit."),
                ),
            ),
            problems=_list(
                "What went wrong outside any test.",
                _keys(
                    "A problem.",
                    name=_text("What kind it is, such as rank lost."),
                    outcome={"enum": ["error", "failed"], "description": "failed: the hardware is to blame."},
                    message=_text("One line."),
                    text=_text("All that is known of it."),
                ),
            ),
            properties=_list("Properties that the suite has given to the run.", _named()),
            links=_keys(
                "What lies beside this file in the run's folder.",
                journal=_text("The record that this file is made of. It also has the samples."),
                artifacts=_text("The folder with the files of tests."),
            ),
        ),
    }


def _verdict() -> Schema:
    return _keys(
        "What was decided.",
        word=_text(f"The verdict: {', '.join(WORDS[:-1])} or {WORDS[-1]}."),
        exit=_integer("The exit code that goes with it."),
        reason=_text("Why, in one line."),
        accepted={
            "type": "boolean",
            "description": "True only where the verdict is ACCEPTED: not for a rehearsal, and not for a selection, "
            "whose exit code is 0 too.",
        },
        rehearsal={"type": "boolean", "description": "True on cpu, where nothing is said about hardware."},
        counts=_map("How many tests had which outcome; outcomes that none had are left out.", _count("Tests.")),
    )


def _run() -> Schema:
    return _keys(
        "What was run, where and when.",
        run_id=_text("The launcher's id of the run."),
        started_at=_text("ISO 8601."),
        ended_at=_text_or_null("ISO 8601; null where the run was cut off."),
        seconds=_number("How long it took, as far as is known."),
        closed_by=_text_or_null("Who closed the record: rank 0, or the recorder after its death; null for nobody."),
        cut={"type": "boolean", "description": "True where the journal's last line was cut off and left out."},
        merged_from=_list(
            "The runs that were merged into this one, the oldest first; empty for a run of its own.",
            _keys(
                "A run.",
                journal=_text("Where its journal was."),
                sha256=_text("The journal's digest."),
                run_id=_text("The launcher's id of the run."),
                started_at=_text("ISO 8601."),
                verdict=_text("Its own verdict."),
                exit=_integer("Its own exit code."),
            ),
        ),
        merged_despite=_list("In what the clusters of merged runs differ.", _text("One difference.")),
        hostname=_text("The host of rank 0."),
        launcher=_text("What started the ranks, such as torchrun."),
        device=_text("cuda or cpu."),
        selection={"type": "boolean", "description": "True where only a part of the suite was asked for."},
        deviations=_list(
            "In what limits or workload asked for less than the shipped ones, or a test passed after a miss.",
            _text("One deviation."),
        ),
        world_size=_integer("Ranks."),
        nnodes=_integer("Nodes."),
        argv=_list("pytest's arguments.", _text("One argument.")),
        options=_map(
            "The settings of this plugin.",
            _keys("A setting.", value=_text("Its value."), origin=_text("Where it was set.")),
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
        criterion=_text_or_null("The criterion that it is; null for a test that is none."),
        outcome={
            "enum": [*OUTCOMES, RUNNING, IN_PROGRESS, NOT_RUN],
            "description": "passed; failed: a limit missed or a wrong result; error: it broke; skipped; running: the "
            "run ended in it; not run: the run ended before it. Of a run that is RUNNING the test of now is in "
            "progress, and those after it are not run.",
        },
        message=_text("One line: the failure, or why it did not run."),
        text=_text("The failure in full."),
        phase=_text_or_null("The phase that decided: setup, call or teardown; null where it has no result."),
        xfail=_text_or_null("Why it was expected to fail; null where it was not."),
        attempts=_integer("How often it was run."),
        applicable={
            "type": "boolean",
            "description": "False where the declared topology has too few ranks or nodes for it.",
        },
        unjudged=_text("Why no limit judged its values, or its rates, although the test asked for it; else empty."),
        started_at=_text_or_null("ISO 8601; null where it was not started."),
        seconds=_number("How long it took, with setup and teardown."),
        spent=_or_null(
            _keys(
                "Where its time went, all attempts together; null where that is not on record.",
                **{part: _part_of_time(what) for part, what in _PARTS_OF_TIME.items()},
            )
        ),
        headline={
            "type": ["integer", "null"],
            "minimum": 0,
            "description": "Which of its measurements decides: the miss that explains the others, "
            "else the one with the least margin.",
        },
        measurements=_list("All that it has measured.", _measurement()),
        ranks=_list(
            "What ranks reported where that is more than a bare pass.",
            _keys(
                "A rank.",
                rank=_integer("Its number."),
                outcome=_text("passed, failed, error, skipped, lost or hung."),
                message=_text("What it said, in one line."),
            ),
        ),
        culprits=_list("The ranks to blame.", _integer("A rank.")),
        released=_list("Ranks that only waited for a culprit and were released.", _integer("A rank.")),
        isolation=_or_null(_isolation()),
        properties=_list("The test's own properties.", _named()),
        artifacts=_text("The folder of its files, beside this file. It is not there where the test wrote none."),
    )


_PARTS_OF_TIME = {
    "set_up": "pytest's set-up phase: fixtures.",
    "warm_up": "Work before anything counts.",
    "measuring": "Work that counts, with waiting for other ranks in it.",
    "verifying": "Making sure that results are right.",
    "agreeing": "The exchanges of all ranks that end a phase, with waiting for ranks that were not so far.",
    "other": "The rest.",
}


def _part_of_time(what: str) -> Schema:
    return _keys(
        what,
        seconds=_number("On the first rank, where all parts together are the whole test."),
        most_seconds=_number("The most of any rank. The others tell theirs when they have torn down."),
        most_rank=_integer("The first rank that it took so long."),
    )


def _limit(what: str) -> Schema:
    return _keys(
        what,
        min=_optional("No rank may be below."),
        max=_optional("No rank may be above."),
        min_ratio_to_median=_optional("What each rank must reach of the median of the others, a ratio."),
        expected=_optional("What a good one reaches: shown beside the limit, never judged."),
        expect_transport=_or_null(
            {
                "type": "array",
                "items": _text("A transport."),
                "description": "What may carry the data; null: anything.",
            }
        ),
        source=_text("Where the figures come from."),
        origin=_text("File and line of the limit."),
    )


def _measurement() -> Schema:
    return _keys(
        "A metric with one set of labels, over all ranks.",
        metric=_text("Its name, such as nccl.all_reduce.busbw."),
        labels=_texts("What tells it from others of its name, such as the size."),
        unit=_text("The unit of value, interval, limit, peak, median, mean and values."),
        better={"enum": ["higher", "lower", None], "description": "Which values are better; null: not known."},
        status={
            "enum": list(STATUSES),
            "description": "passed or failed against its limit; error: it could not be judged; recorded: no limit "
            "was asked for.",
        },
        reason=_text("Why it failed or could not be judged."),
        inconclusive=_text("Why the value cannot be told from its limit; empty where it can."),
        stopped=_or_null(
            _keys(
                "Why the worst rank took no more samples; null where it took none, or the journal is older.",
                by={
                    "enum": list(STOPPED_BY),
                    "description": "interval: the 95 % interval of the median was narrow enough; time: the time was up "
                    "and the extension too; samples: there were no more to take.",
                },
                samples=_integer("How many there were."),
                seconds=_number("How long they took together; 0 where they were not taken for this."),
                width_ratio=_number("How wide the interval was, as a ratio of the median."),
                allowed_ratio=_number("How wide it might be."),
                extended={
                    "type": "boolean",
                    "description": "Whether they took longer than the longest time.",
                },
            )
        ),
        value=_optional("The worst rank's value, which decides; null where there is none."),
        interval=_or_null(
            {
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "items": _number("An end."),
                "description": "It encloses the true value with 95 % confidence; null where that is not known.",
            }
        ),
        worst=_or_null(
            _keys(
                "Where that value was measured; null where no rank stands out.",
                rank=_integer("The rank."),
                host=_text_or_null("Its host."),
                gpu_uuid=_text_or_null("Its GPU."),
            )
        ),
        limit=_or_null(_limit("What was demanded; null where no limit applies.")),
        shipped_limit=_or_null(
            _limit("The shipped limit, where the site's file asks for less with a source of its own; else null.")
        ),
        margin=_optional(
            "By which ratio of the limit the value keeps it; negative: misses it. Of a limit of zero the distance."
        ),
        peak=_optional("The data sheet's figure that the value stands beside."),
        peak_ratio=_optional("The value as a ratio of that."),
        median=_optional("The median of all ranks."),
        mean=_optional("The mean of all ranks."),
        ratio_to_median=_optional("The lowest rank over the median of the others."),
        values=_map("Each rank's value by its number.", _number("A value.")),
        baseline=_or_null(
            _keys(
                "What it is beside the baseline's value, of the worst rank; null without a baseline.",
                kind=_text("better, worse, within noise and the like (docs/compare.md)."),
                old=_optional("The baseline's value."),
                old_rank={"type": ["integer", "null"], "description": "The rank there."},
                rank={"type": ["integer", "null"], "description": "The rank here."},
                matched_by=_text("How the two ranks were matched."),
                change_ratio=_optional("The change; positive is better."),
                allowed_ratio=_optional("What is allowed of a change for the worse."),
                decides={"type": "boolean", "description": "Whether it can fail the test."},
                why=_text("What there is to say of it."),
            )
        ),
        telemetry=_text("What the GPU of the worst rank did meanwhile; empty where that is not known."),
    )


def _isolation() -> Schema:
    return _keys(
        "What the search for who is to blame has found; null where there was none.",
        culprits=_list(
            "Confirmed by further probes with known-good partners.",
            _keys(
                "A node, a GPU, or the link between two.",
                names=_list("What it is called; of a link both ends.", _text("A name.")),
                kind=_text("unit or link."),
                failed={"type": ["integer", "null"], "description": "Probes with it that failed ..."},
                probes={"type": ["integer", "null"], "description": "... of so many."},
                evidence=_list("What was seen.", _text("One line.")),
            ),
        ),
        cleared=_list("Those that have passed with others.", _text("A name.")),
        undecided=_list("The rest.", _text("A name.")),
        why_undecided=_text("Why there is a rest."),
        reproduced={"type": "boolean", "description": "Whether the fault showed again."},
        cut_short=_text("Why the search ended before it was through; empty where it did not."),
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
