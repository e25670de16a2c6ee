"""``gpucluster lora``: prepare data for LoRA, evaluate a saved adapter, make a reference curve of runs."""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.benchmarks.lora import reference_curve
from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.errors import CurveError, EnvironmentBroken, JournalError, WrongResult
from pytest_gpucluster.journal import journal
from pytest_gpucluster.journal.journal import JOURNAL_FILE
from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name
from pytest_gpucluster.metrics.loss_curve import read_csv
from pytest_gpucluster.text import one_line, plural

if TYPE_CHECKING:
    from pytest_gpucluster.benchmarks.lora.dataset import Row
    from pytest_gpucluster.benchmarks.lora.evaluation import Answer

_SOURCE = "a file of rows, or owner/name or owner/name@revision on the Hugging Face hub"
_MOST_EXAMPLES = 10
_CHARACTERS = 300


_EXAMPLES = """\
    gpucluster lora prepare glaive-function-calling-v2.json --model Qwen2-7B/ --out blocks.safetensors
    gpucluster lora evaluate final/ --data blocks.safetensors --limit 200
    gpucluster lora reference-curve run-1/curve.csv run-2/curve.csv --out reference.json
    """
_EXIT_CODES = {
    cli.DONE: "done",
    cli.NO_INPUT: "the rows, model, adapter or curve cannot be used; the curves are of different experiments; "
    "or a package is missing",
}


def _sha256(text: str) -> str:
    if not re.fullmatch("[0-9A-Fa-f]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a SHA-256: 64 digits of 0-9 and a-f, as from sha256sum")
    return text.lower()


_ROW_OPTIONS = (
    cli.option("--sha256 HEX", "required digest of the file of rows", type=_sha256),
    cli.option("--held-out PART", "share to hold out", type=cli.quantity("ratio", 0.0001, 0.9999), default="2%"),
    cli.option("--seed N", "selects the held-out ones", type=int, default=0),
    cli.option(
        "--rendering HOW",
        "glaive, or chat: by the chat template of the tokenizer (default: glaive, or that of packed blocks)",
        choices=("glaive", "chat"),
    ),
)


def _with_lora(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return a command that ends with ``NO_INPUT`` for a missing package, and for what a model or the hub lacks."""

    @functools.wraps(run)
    def guarded(options: argparse.Namespace) -> int:
        from pytest_gpucluster.benchmarks.lora.hub import INSTALL

        try:
            return run(options)
        except ImportError as error:
            return cli.complain(f"{error.name or error} is not installed; install it with {INSTALL}", cli.NO_INPUT)
        except (EnvironmentBroken, WrongResult) as error:
            return cli.complain(str(error), cli.NO_INPUT)

    return guarded


@cli.command(
    cli.argument("source", metavar="SOURCE", help=_SOURCE),
    cli.one_of(
        cli.option("--model PATH", "take the tokenizer of this model: a folder or a hub name"),
        cli.option("--tiny", "train a tokenizer of 512 tokens on the rows: for rehearsals"),
        required=True,
    ),
    cli.option("--sequence N", "positions of a block", type=cli.number(), default=4096),
    cli.option("--out FILE", "write the blocks here, as safetensors", type=Path, required=True),
    *_ROW_OPTIONS,
    help="pack rows into blocks of tokens",
)
@_with_lora
def _prepare(options: argparse.Namespace) -> int:
    """Read conversations, hold a part of them out, and pack both parts into blocks of tokens of one length.

    SOURCE is one JSON array or JSONL, with rows {system, chat} as in glaive-function-calling-v2, or {messages, tools};
    or the name of a data set on the Hugging Face hub. The file holds the blocks, the tokens that count in the loss, the
    held-out conversations, and the origin of all of it. The statistics go to standard output, as JSON.
    """
    from pytest_gpucluster.benchmarks.lora import dataset, packed_file, packing

    out: Path = options.out
    if out.is_dir() or not out.parent.is_dir():
        wrong = "is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise cli.CommandError(cli.NO_OUTPUT, f"--out {out}: {wrong}; name a file")
    cli.require_distinct([("--out", out)], [Path(options.source)], "the source itself")
    # Before any hub is asked. Then the tokenizer: it loads quickly, the rows do not.
    dataset.located(options.source)
    encoder = None if options.tiny else packing.tokenizer_for(options.model)
    loaded = dataset.load_rows(options.source, sha256=options.sha256)
    try:
        if encoder is None:
            encoder = packing.tiny_tokenizer(loaded.rows)
        prepared = packed_file.prepare(
            loaded,
            encoder,
            name=options.model or "tiny",
            sequence=options.sequence,
            held_out=options.held_out,
            seed=options.seed,
            rendering=options.rendering or "glaive",
        )
    except ValueError as error:
        return cli.complain(f"{options.source}: {error}", cli.NO_INPUT)
    with cli.file_errors(cli.NO_OUTPUT, f"--out {out}"):
        packed_file.write(out, prepared)
    for line in loaded.malformed[:_MOST_EXAMPLES]:
        cli.complain(f"{options.source}: left out {one_line(line, _CHARACTERS)}", cli.DONE)
    parts = {"train": asdict(prepared.train.statistics), "held_out": asdict(prepared.held_out.statistics)}
    print(json.dumps({"rows": len(loaded.rows), "malformed": len(loaded.malformed), **parts}, indent=2))
    return cli.complain(
        f"{len(prepared.train)} blocks for training, {len(prepared.held_out)} held out: {out}", cli.DONE
    )


@cli.command(
    cli.argument("adapter", metavar="ADAPTER_FOLDER", type=Path, help="a saved adapter, such as final/"),
    cli.option(
        "--data SOURCE",
        f"the output of `lora prepare`; or {_SOURCE}, of which the same part is held out",
        required=True,
    ),
    cli.option("--base MODEL", "the base model: a folder or a hub name (default: that of the adapter)"),
    cli.option("--limit N", "the most answers to generate", type=cli.number(), default=200),
    cli.option("--max-new-tokens N", "the longest answer, in tokens", type=cli.number(), default=256),
    cli.option("--batch N", "prompts at a time", type=cli.number(), default=8),
    cli.option("--device DEVICE", "cuda, cuda:1 or cpu (default: cuda if available)"),
    *_ROW_OPTIONS,
    help="evaluate the function calls of a saved adapter",
)
@_with_lora
def _evaluate(options: argparse.Namespace) -> int:
    """Load an adapter on its model, let it generate the first function call of held-out conversations with greedy
    decoding, or the first answer where no call is due, and print as JSON how many of the answers are well-formed calls,
    call the right function, and have the right arguments, also by function; how well it knows whether to call; and the
    first wrong answers.
    """
    from pytest_gpucluster.benchmarks.lora import evaluation
    from pytest_gpucluster.benchmarks.lora.packing import rendering_of

    try:
        device = evaluation.choose_device(options.device)
    except ValueError as error:
        return cli.complain(f"--device {options.device}: {error}", cli.USAGE)
    try:
        held_out, rendering = _held_out(options)
    except ValueError as error:
        return cli.complain(f"--data {options.data}: {error}", cli.NO_INPUT)
    model, tokenizer, base = evaluation.load_adapter(options.adapter, device, base=options.base)
    score = evaluation.evaluate(
        model,
        tokenizer,
        held_out,
        device=device,
        limit=options.limit,
        max_new_tokens=options.max_new_tokens,
        batch=options.batch,
        render=rendering_of(rendering, tokenizer),
    )
    if not score.answers:
        why = "; ".join(f"{count} times {reason}" for reason, count in score.skipped.items()) or "there are none"
        return cli.complain(
            f"--data {options.data}: no held-out conversation has an answer to generate: {why}", cli.NO_INPUT
        )
    wrong = [answer for answer in score.answers if not answer.right]
    found = {
        "adapter": str(options.adapter),
        "base": base,
        "data": str(options.data),
        **score.counts,
        "ratios": {name: None if math.isnan(ratio) else ratio for name, ratio in score.ratios().items()},
        "by_function": score.by_function(),
        "skipped": dict(score.skipped),
        "wrong": [_wrong_answer(answer) for answer in wrong[:_MOST_EXAMPLES]],
    }
    print(json.dumps(found, indent=2))
    return cli.DONE


def _held_out(options: argparse.Namespace) -> tuple[Sequence[Row], str]:
    from pytest_gpucluster.benchmarks.lora import dataset, packed_file
    from pytest_gpucluster.benchmarks.lora.dataset import held_out_split

    path = Path(options.data)
    if packed_file.is_prepared(path):
        prepared = packed_file.read(path)
        return prepared.held_out_rows, options.rendering or prepared.context["rendering"]
    loaded = dataset.load_rows(options.data, sha256=options.sha256)
    return held_out_split(loaded.rows, options.held_out, options.seed)[1], options.rendering or "glaive"


def _wrong_answer(answer: Answer) -> dict[str, Any]:
    due = answer.expected
    if due is None:
        return {"expected": None, "text": answer.text, "reason": "no call is due"}
    reason = getattr(answer.found, "reason", None)
    if reason is None:
        reason = "other arguments" if answer.grade == 2 else "another function"
    return {"expected": {"name": due.name, "arguments": dict(due.arguments)}, "text": answer.text, "reason": reason}


@cli.command(
    cli.argument(
        "curves",
        metavar="CURVE.csv",
        type=Path,
        nargs="+",
        help="a curve among the artifacts of a run, of a test that passed",
    ),
    cli.option("--out FILE", "write the reference curve here", type=Path, required=True),
    help="make a reference curve of the losses of one or more runs",
)
def _reference_curve(options: argparse.Namespace) -> int:
    """Make a reference loss curve of one or more runs of the same experiment, for --gpucluster-reference-curve."""
    out: Path = options.out
    paths: list[Path] = options.curves
    twice = [path for path in paths if [each.resolve() for each in paths].count(path.resolve()) > 1]
    if twice:
        raise cli.CommandError(cli.USAGE, f"{twice[0]} is given {len(twice)} times; a run counts once")
    cli.require_distinct([("--out", out)], paths, "one of the curves")
    try:
        curves = [read_csv(path) for path in paths]
        for path in paths:
            _require_passed(path)
        with cli.file_errors(cli.NO_OUTPUT, f"--out {out}"):
            made = reference_curve.write(out, curves)
    except CurveError as error:
        runs = "; ".join(f"run {run} is {path}" for run, path in enumerate(paths, start=1))
        raise cli.CommandError(cli.NO_INPUT, f"{error} ({runs})") from error
    losses = f"loss {made.loss[0]:.4g} to {made.loss[-1]:.4g}, band at most {max(made.band):.2g}"
    what = f"reference curve of {plural(made.runs, 'run')}, {len(made.steps)} steps"
    return cli.complain(f"{what}, {losses}: {out}", cli.DONE)


def _require_passed(curve: Path) -> None:
    """Refuse the curve of a test that did not pass, or of a rejected run, as the journal of its run's folder has it."""
    folder = next((parent for parent in curve.resolve().parents if parent.name == ARTIFACTS), None)
    if folder is None or not (folder.parent / JOURNAL_FILE).is_file():
        return  # a copy, which states no outcome
    try:
        run = journal.read(folder.parent / JOURNAL_FILE, keep_samples=False)
    except (JournalError, OSError) as error:
        raise CurveError(f"{curve}: whether its test passed cannot be read: {error}") from None
    name = curve.resolve().relative_to(folder).parts[0]
    passed = any(artifacts_name(result.nodeid) == name and result.outcome == "passed" for result in run.results)
    if not passed or run.has_failed:
        what = "run was rejected" if passed else "test did not pass"
        raise CurveError(f"{curve}: its {what}; make the reference of a training that was accepted")


COMMAND = cli.Group(
    description="Prepare the data of the LoRA criteria, and work with the results of a training.",
    commands={"prepare": _prepare, "evaluate": _evaluate, "reference-curve": _reference_curve},
    examples=_EXAMPLES,
    codes=_EXIT_CODES,
)
