"""``gpucluster data``: rows made into packed blocks, and a saved adapter asked for function calls."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.cli.command import complain, explain
from pytest_gpucluster.errors import EnvironmentBroken, UnitError, WrongResult
from pytest_gpucluster.metrics import units
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from pytest_gpucluster.benchmarks.lora.dataset import Row
    from pytest_gpucluster.benchmarks.lora.evaluation import Answer, CallScore
    from pytest_gpucluster.benchmarks.lora.packed_file import Prepared
    from pytest_gpucluster.benchmarks.lora.packing import Packed

DONE, USAGE, FAILED, NO_OUTPUT = 0, 2, 3, 4

EXIT_CODES = """\
exit codes:
  0  done
  2  wrong usage
  3  the rows, the model or the adapter cannot be used, or a package is missing
  4  the output cannot be written
"""

_EXAMPLES = """\
  gpucluster data prepare glaive-function-calling-v2.json --model Qwen2-7B/ --out blocks.safetensors
  gpucluster data evaluate final/ --data blocks.safetensors --limit 200
"""

_DATA = "Prepare the rows that LoRA learns function calls from, and ask a saved adapter for calls."

_PREPARE = """\
Read conversations, hold a part of them out, and pack both parts into blocks of tokens of one length. SOURCE is one JSON
array or JSONL, with rows {system, chat} as in glaive-function-calling-v2 or {instruction, input, output}; or the name
of a data set on the Hugging Face hub. The file holds the blocks, which tokens are judged, the conversations that were
held out, and where all of it comes from. The statistics go to the standard output.
"""

_EVALUATE = """\
Load an adapter on its model, let it write the first function call of held-out conversations, always the likeliest
token, and print how many of the answers are well-formed calls, call the right function, and have the right arguments.
"""

_SOURCE = "a file of rows, or owner/name or owner/name@revision on the Hugging Face hub"
_WRONG_SHOWN = 10
_CHARACTERS = 300


def configure(parser: argparse.ArgumentParser) -> None:
    """Add ``data prepare`` and ``data evaluate``."""
    explain(parser, _DATA, _EXAMPLES, EXIT_CODES)
    steps = parser.add_subparsers(dest="step", metavar="STEP", required=True)
    prepare = steps.add_parser("prepare", help="make packed blocks of rows")
    explain(prepare, _PREPARE, _EXAMPLES, EXIT_CODES)
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
    evaluate = steps.add_parser("evaluate", help="ask a saved adapter for function calls")
    explain(evaluate, _EVALUATE, _EXAMPLES, EXIT_CODES)
    evaluate.add_argument("adapter", metavar="ADAPTER_FOLDER", type=Path, help="a saved adapter, such as final/")
    evaluate.add_argument(
        "--data",
        metavar="SOURCE",
        required=True,
        help=f"a file that `data prepare` has made; or {_SOURCE}, of which the same part is held out as there",
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
    """Carry out ``data prepare`` or ``data evaluate`` and return the exit code."""
    try:
        return _prepare(options) if options.step == "prepare" else _evaluate(options)
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
    for name in ("rows", "tokens", "judged", "longest", "blocks", "judged_targets", "dropped"):
        figures = "".join(f"{getattr(part.statistics, name):>14}" for part in parts)
        print(f"{name.replace('_', ' '):<16}{figures}")
    shares = "".join(f"{part.statistics.judged / part.statistics.tokens:>14.1%}" for part in parts)
    print(f"{'judged part':<16}{shares}\n")
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
        why = "; ".join(f"{count} times {reason}" for reason, count in score.unasked.items()) or "there are none"
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
    for reason, count in score.unasked.items():
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
        "unasked": dict(score.unasked),
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
