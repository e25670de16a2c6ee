"""``gpucluster lora``: data prepared for LoRA, a saved adapter evaluated, a reference curve made of runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.benchmarks.lora import reference_curve
from pytest_gpucluster.cli.command import DONE, NO_OUTPUT, USAGE, Step, add_steps, complain, explain, run_step
from pytest_gpucluster.errors import CurveError, EnvironmentBroken, JournalError, UnitError, WrongResult
from pytest_gpucluster.journal import journal
from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name
from pytest_gpucluster.metrics import units
from pytest_gpucluster.metrics.loss_curve import FIRST_LINE, Curve, is_curve, read_csv
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from pytest_gpucluster.benchmarks.lora.dataset import Row
    from pytest_gpucluster.benchmarks.lora.evaluation import Answer, CallScore
    from pytest_gpucluster.benchmarks.lora.packed_file import Prepared
    from pytest_gpucluster.benchmarks.lora.packing import Packed

FAILED = 3

LORA_EXIT_CODES = """\
exit codes:
  0  done
  2  wrong usage
  3  the rows, the model or the adapter cannot be used, or a package is missing
  4  the output cannot be written
"""

_LORA_EXAMPLES = """\
  gpucluster lora prepare glaive-function-calling-v2.json --model Qwen2-7B/ --out blocks.safetensors
  gpucluster lora evaluate final/ --data blocks.safetensors --limit 200
"""

_LORA = "Prepare the data of the LoRA criteria, and work with what a training has left."

_PREPARE = """\
Read conversations, hold a part of them out, and pack both parts into blocks of tokens of one length. SOURCE is one JSON
array or JSONL, with rows {system, chat} as in glaive-function-calling-v2 or {instruction, input, output}; or the name
of a data set on the Hugging Face hub. The file holds the blocks, which tokens count in the loss, the held-out
conversations, and the origin of all of it. The statistics go to the standard output.
"""

_EVALUATE = """\
Load an adapter on its model, let it write the first function call of held-out conversations, always the likeliest
token, and print how many of the answers are well-formed calls, call the right function, and have the right arguments.
"""

_SOURCE = "a file of rows, or owner/name or owner/name@revision on the Hugging Face hub"
_WRONG_SHOWN = 10
_CHARACTERS = 300


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``lora``."""
    add_steps(parser, _LORA, STEPS)


def configure_prepare(prepare: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lora prepare``."""
    explain(prepare, _PREPARE, _LORA_EXAMPLES, LORA_EXIT_CODES)
    prepare.add_argument("source", metavar="SOURCE", help=_SOURCE)
    tokens = prepare.add_mutually_exclusive_group(required=True)
    tokens.add_argument("--model", metavar="PATH", help="take the tokenizer of this model: a folder or a hub name")
    tokens.add_argument(
        "--tiny", action="store_true", help="train a tokenizer of 512 tokens on the rows: for rehearsals"
    )
    prepare.add_argument(
        "--sequence", metavar="N", type=_count, default=4096, help="positions of a block (default: 4096)"
    )
    prepare.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="write the blocks here, as safetensors"
    )
    _add_of_rows(prepare)


def configure_evaluate(evaluate: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lora evaluate``."""
    explain(evaluate, _EVALUATE, _LORA_EXAMPLES, LORA_EXIT_CODES)
    evaluate.add_argument("adapter", metavar="ADAPTER_FOLDER", type=Path, help="a saved adapter, such as final/")
    evaluate.add_argument(
        "--data",
        metavar="SOURCE",
        required=True,
        help=f"a file that `lora prepare` has made; or {_SOURCE}, of which the same part is held out as there",
    )
    evaluate.add_argument(
        "--base", metavar="MODEL", help="the model beneath: a folder or a hub name (default: as the adapter says)"
    )
    evaluate.add_argument(
        "--limit", metavar="N", type=_count, default=200, help="ask for so many calls at most (default: 200)"
    )
    evaluate.add_argument(
        "--max-new-tokens", metavar="N", type=_count, default=256, help="of an answer, at most (default: 256)"
    )
    evaluate.add_argument("--batch", metavar="N", type=_count, default=8, help="prompts at a time (default: 8)")
    evaluate.add_argument("--device", metavar="DEVICE", help="cuda, cuda:1 or cpu (default: cuda if there is one)")
    evaluate.add_argument("--json", action="store_true", help="print JSON, with the first wrong answers")
    _add_of_rows(evaluate)


def run(options: argparse.Namespace) -> int:
    """Carry out a command of ``lora`` and return the exit code."""
    try:
        return run_step(options)
    except ImportError as error:
        return complain(f"{error.name or error} is not installed; install it with {_install()}", FAILED)
    except (EnvironmentBroken, WrongResult) as error:
        return complain(str(error), FAILED)
    except (MemoryError, RuntimeError) as error:
        # Torch's own is known by its name, so that --help needs no torch.
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
            raise
        return complain(f"no memory left: {_shown(error)}; choose a smaller --batch, or another --device", FAILED)


def _add_of_rows(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sha256", metavar="HEX", type=_digest, help="what the file of rows must have")
    parser.add_argument(
        "--held-out",
        metavar="PART",
        type=_part,
        default="2%",
        help="the part of the conversations to hold out (default: 2%%)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of which are held out (default: 0)")


def _prepare(options: argparse.Namespace) -> int:
    from pytest_gpucluster.benchmarks.lora import dataset, packed_file, packing

    out: Path = options.out
    if out.is_dir() or not out.parent.is_dir():
        wrong = "is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        return complain(f"--out {out}: {wrong}; name a file", NO_OUTPUT)
    if os.path.realpath(out) == os.path.realpath(options.source):
        return complain(f"--out {out}: that is the source itself; name another file", USAGE)
    # The tokenizer first: it is loaded in a moment, and the rows are not.
    encoder = None if options.tiny else packing.tokenizer_for(options.model)
    loaded = dataset.load_rows(options.source, sha256=options.sha256)
    try:
        if encoder is None:
            encoder = packing.tiny_tokenizer(loaded.rows)
        made = packed_file.prepare(
            loaded,
            encoder,
            name=options.model or "tiny",
            sequence=options.sequence,
            held_out=options.held_out,
            seed=options.seed,
        )
    except ValueError as error:
        return complain(f"{options.source}: {error}", FAILED)
    try:
        packed_file.write(out, made)
    except OSError as error:
        return complain(f"--out {out}: {error.strerror or error}", NO_OUTPUT)
    for line in loaded.malformed[:_WRONG_SHOWN]:
        print(f"gpucluster: {options.source}: left out {one_line(str(line), _CHARACTERS)}", file=sys.stderr)
    _print_statistics(made, len(loaded.rows), len(loaded.malformed))
    print(f"gpucluster: {len(made.train)} blocks to train on, {len(made.held_out)} held out: {out}", file=sys.stderr)
    return DONE


def _print_statistics(made: Prepared, rows: int, malformed: int) -> None:
    print(f"{'rows read':<16}{rows:>14}\n{'malformed':<16}{malformed:>14}\n")
    print(f"{'':<16}{'train':>14}{'held out':>14}")
    parts: tuple[Packed, ...] = (made.train, made.held_out)
    for name in ("rows", "tokens", "loss_tokens", "longest", "blocks", "loss_targets", "dropped"):
        figures = "".join(f"{getattr(part.statistics, name):>14}" for part in parts)
        print(f"{name.replace('_', ' '):<16}{figures}")
    shares = "".join(f"{part.statistics.loss_tokens / part.statistics.tokens:>14.1%}" for part in parts)
    print(f"{'loss part':<16}{shares}\n")
    for name, value in made.context.items():
        print(f"{name.replace('_', ' '):<18}{value or '-'}")


def _evaluate(options: argparse.Namespace) -> int:
    from pytest_gpucluster.benchmarks.lora import evaluation
    from pytest_gpucluster.benchmarks.lora.evaluation import choose_device, evaluate

    try:
        device = choose_device(options.device)
    except ValueError as error:
        return complain(f"--device {options.device}: {error}", USAGE)
    try:
        held_out = _held_out(options)
    except ValueError as error:
        return complain(f"--data {options.data}: {error}", FAILED)
    saved = evaluation.load_adapter(options.adapter, device, base=options.base)
    score = evaluate(
        saved.model,
        saved.tokenizer,
        held_out,
        device=device,
        limit=options.limit,
        max_new_tokens=options.max_new_tokens,
        batch=options.batch,
    )
    if not score.asked:
        why = "; ".join(f"{count} times {reason}" for reason, count in score.skipped.items()) or "there are none"
        return complain(f"--data {options.data}: no held-out conversation can be asked for a call: {why}", FAILED)
    if options.json:
        print(json.dumps(_as_json(score, options, saved.base), indent=2))
    else:
        _print_score(score)
    return DONE


def _held_out(options: argparse.Namespace) -> tuple[Row, ...] | list[Row]:
    from pytest_gpucluster.benchmarks.lora import dataset, packed_file
    from pytest_gpucluster.benchmarks.lora.dataset import held_out_split

    path = Path(options.data)
    if path.is_file() and packed_file.is_prepared(path):
        return packed_file.read(path).held_out_rows
    loaded = dataset.load_rows(options.data, sha256=options.sha256)
    return held_out_split(loaded.rows, options.held_out, options.seed)[1]


def _print_score(score: CallScore) -> None:
    print(f"{'calls asked for':<18}{score.asked:>8}")
    for name, ratio in score.ratios().items():
        print(f"{name.replace('_', ' '):<18}{getattr(score, name):>8}{ratio:>10.1%}")
    for reason, count in score.skipped.items():
        print(f"gpucluster: {count} conversations were not asked: {reason}", file=sys.stderr)


def _as_json(score: CallScore, options: argparse.Namespace, base: str) -> dict[str, Any]:
    wrong = [answer for answer in score.answers if not answer.right_arguments]
    return {
        "adapter": str(options.adapter),
        "base": base,
        "data": str(options.data),
        "asked": score.asked,
        **{name: getattr(score, name) for name in score.ratios()},
        "ratios": score.ratios(),
        "skipped": dict(score.skipped),
        "wrong": [_wrong(answer) for answer in wrong[:_WRONG_SHOWN]],
    }


def _wrong(answer: Answer) -> dict[str, Any]:
    expected = {"name": answer.expected.name, "arguments": dict(answer.expected.arguments)}
    reason = getattr(answer.found, "reason", None)
    if reason is None:
        reason = "the arguments are others" if answer.right_function else "the function is another"
    return {"expected": expected, "said": answer.text, "reason": reason}


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return number


def _part(text: str) -> float:
    try:
        ratio = units.parse(text, like="%").to("ratio")
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 0 < ratio < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 % and 100 %")
    return ratio


def _digest(text: str) -> str:
    digest = text.strip().lower()
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text!r} is no sha256: 64 digits of 0-9 and a-f, as sha256sum prints them")
    return digest


def _shown(error: Exception) -> str:
    return one_line(str(error) or type(error).__name__, _CHARACTERS)


def _install() -> str:
    from pytest_gpucluster.benchmarks.lora.hub import INSTALL

    return INSTALL


NO_INPUT = 3

REFERENCE_CURVE_EXIT_CODES = """\
exit codes:
  0  done
  2  wrong usage
  3  a curve or journal is missing or damaged, or the curves are not alike
  4  the output cannot be written
"""

_REFERENCE_CURVE_EXAMPLES = """\
  gpucluster lora reference-curve run-1/curve.csv gpucluster-report/latest --out reference.json
"""

_REFERENCE_CURVE = """\
Make a reference loss curve of one or more runs of the same experiment, for --gpucluster-reference-curve. Of a journal
or a folder of a run the curve among its artifacts is taken, if its test passed; of a report directory the latest run's.
"""


def configure_reference_curve(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lora reference-curve``."""
    explain(parser, _REFERENCE_CURVE, _REFERENCE_CURVE_EXAMPLES, REFERENCE_CURVE_EXIT_CODES)
    parser.add_argument(
        "curves",
        metavar="CURVE.csv|JOURNAL",
        type=Path,
        nargs="+",
        help="the CSV file of a curve, a journal.jsonl, the folder of a run, or a report directory (its latest run)",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="write the reference curve here")
    parser.add_argument(
        "--test", metavar="TEXT", default="", help="of a run, the curve of the test with this in its id, as lora_tiny"
    )


def run_reference_curve(options: argparse.Namespace) -> int:
    """Make a reference curve, and return the exit code."""
    return make(options.curves, options.out, options.test)


def make(places: Sequence[Path], out: Path, test: str = "") -> int:
    """Make a reference curve of the curves in these places, write it, and return the exit code.

    Args:
        places: CSV files of curves; or journals, folders of runs or report directories, each with one curve among the
            artifacts of its tests.
        out: the file to write.
        test: of a run, only the curves of tests with this text in their id.
    """
    try:
        curves = [curve_of(place, test) for place in places]
    except (CurveError, JournalError) as error:
        return complain(str(error), NO_INPUT)
    files = [os.path.realpath(path) for path, _ in curves]
    twice = [path for path, _ in curves if files.count(os.path.realpath(path)) > 1]
    if twice:
        return complain(f"{twice[0]} is given {len(twice)} times; a run counts once", USAGE)
    if os.path.realpath(out) in files:
        return complain(f"--out {out}: that is one of the curves; name another file", USAGE)
    try:
        made = reference_curve.write(out, [curve for _, curve in curves])
    except CurveError as error:
        runs = "; ".join(f"run {number} is {path}" for number, (path, _) in enumerate(curves, start=1))
        return complain(f"{error} ({runs})", NO_INPUT)
    except OSError as error:
        return complain(f"--out {out}: {error.strerror or error}", NO_OUTPUT)
    widest = max(made.band)
    runs = "1 run" if made.runs == 1 else f"{made.runs} runs"
    print(
        f"gpucluster: reference curve of {runs}, {len(made.steps)} steps, loss {made.loss[0]:.4g} to "
        f"{made.loss[-1]:.4g}, band at most {widest:.2g}: {out}",
        file=sys.stderr,
    )
    return DONE


def curve_of(place: Path, test: str = "") -> tuple[Path, Curve]:
    """Return the file of a curve, and the curve: of a CSV file, or of the run that a journal or folder is of.

    Args:
        place: the file or folder.
        test: of a run, only the curves of tests with this text in their id.

    Raises:
        CurveError: there is no curve, or more than one, or its test did not pass.
        JournalError: the journal cannot be read.
    """
    try:
        if place.is_file() and (place.suffix == ".csv" or is_curve(place)):
            return place, read_csv(place)
        path = journal.locate(place)
        try:
            record = journal.read(path, keep_samples=False)
        except JournalError as error:
            if path.name == journal.JOURNAL_FILE:
                raise
            raise CurveError(f"{error}; and no loss curve, which begins with {FIRST_LINE!r}") from None
        folder = path.parent / ARTIFACTS
        tests = {artifacts_name(result.nodeid): result for result in record.results if test in result.nodeid}
        found = sorted(
            file
            for file in folder.glob("*/**/*.csv")
            if is_curve(file) and (not test or file.relative_to(folder).parts[0] in tests)
        )
    except OSError as error:
        raise CurveError(f"{place}: {error.strerror or error}") from None
    if len(found) != 1:
        of = f" of tests with {test!r}" if test else ""
        listed = ": " + ", ".join(map(str, found)) if found else ""
        raise CurveError(
            f"{place}: {len(found) or 'no'} loss curves in {folder}{of}{listed}; "
            "name the CSV file of the one that is meant, or its test with --test"
        )
    [file] = found
    result = tests.get(file.relative_to(folder).parts[0])
    if result is not None and result.outcome == "passed":
        return file, read_csv(file)
    raise CurveError(
        f"{file}: its test did not pass, so it is no curve to go by; to use it all the same, name the CSV file itself"
    )


STEPS = {
    "prepare": Step(help="packed blocks of rows", configure=configure_prepare, run=_prepare),
    "evaluate": Step(help="ask a saved adapter for function calls", configure=configure_evaluate, run=_evaluate),
    "reference-curve": Step(
        help="a reference curve of the losses of one or more runs",
        configure=configure_reference_curve,
        run=run_reference_curve,
    ),
}
