"""A saved adapter loaded again, and evaluated on function calls that it was not trained on.

The adapter is loaded as its users do, from the folder that peft has saved, onto a new model. The score is whether that
model calls the right function with the right arguments. :func:`choose_device` selects where it runs.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.lora.dataset import Row
from pytest_gpucluster.benchmarks.lora.function_calls import FunctionCall, has_call, parse, same_json
from pytest_gpucluster.benchmarks.lora.hub import local_only
from pytest_gpucluster.benchmarks.lora.model import DTYPES, Base, MaskedLoss, make_base, read_model
from pytest_gpucluster.benchmarks.lora.packing import Packed, Render, ids_of, segments, tokenizer_for
from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.benchmarks.training.loader import in_batches
from pytest_gpucluster.device.identity import VisibleGpus
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.text import first_line


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The model's answer.

    Attributes:
        expected: the call in the conversation; None where none is due.
        text: the model's text.
        found: the call in it, or the reason why there is none.
    """

    expected: FunctionCall | None
    text: str
    found: FunctionCall | str

    @property
    def grade(self) -> int:
        """3: the expected call, its arguments compared as JSON values. 2: with other arguments. 1: another call that a
        program can read. 0: none."""
        if not isinstance(self.found, FunctionCall):
            return 0
        if self.expected is None or self.found.name != self.expected.name:
            return 1
        try:
            return 3 if same_json(self.found.arguments, self.expected.arguments) else 2
        except RecursionError:
            return 2

    @property
    def right(self) -> bool:
        """Whether it is the expected call, or none where none is due."""
        return self.grade == 3 if self.expected is not None else not has_call(self.text)


@dataclass(frozen=True, kw_only=True)
class CallScore:
    """Calls due, and calls made.

    Attributes:
        counts: asked: conversations in which the model was prompted for a call. called: answers to these that are a
            call, well-formed or not. well_formed, right_function, right_arguments: answers to these that are a
            well-formed call, that call the expected function, and with the expected arguments. not_due: conversations
            without a call, in which the model was prompted for its first answer. unneeded: answers to these that are a
            call.
        skipped: conversations that were left out, by the reason.
        answers: the model's answers, in the order of the rows.
    """

    counts: Mapping[str, int]
    skipped: Mapping[str, int]
    answers: tuple[Answer, ...] = ()

    def ratios(self) -> dict[str, float]:
        """Return, by name, the parts of ``asked`` that are right; and of the intent, which is whether to call:
        accuracy, precision, recall and F1. NaN where there is nothing to divide by."""
        asked, called, not_due, unneeded = (self.counts[name] for name in ("asked", "called", "not_due", "unneeded"))
        parts = {name: (self.counts[name], asked) for name in _COUNTS}
        parts["intent_accuracy"] = (called + not_due - unneeded, asked + not_due)
        parts["intent_precision"], parts["intent_recall"] = (called, called + unneeded), (called, asked)
        parts["intent_f1"] = (2 * called, called + unneeded + asked)
        return {name: count / of if of else math.nan for name, (count, of) in parts.items()}

    def by_function(self) -> dict[str, dict[str, int]]:
        """Return the counts of the answers, by the function that is due."""
        found: dict[str, Counter[str]] = {}
        for answer in self.answers:
            if answer.expected is not None:
                counts = found.setdefault(answer.expected.name, Counter())
                counts["asked"] += 1
                counts.update(_COUNTS[: answer.grade])
        return {name: {count: counts[count] for count in ("asked", *_COUNTS)} for name, counts in sorted(found.items())}


@releases_memory()
def evaluate(
    model: Any,
    tokenizer: Any,
    rows: Iterable[Row],
    *,
    device: torch.device,
    limit: int | None,
    max_new_tokens: int,
    batch: int = 8,
    render: Render = segments,
) -> CallScore:
    """Let a model write the first call of each conversation, or its first answer if no call is in it, and compare.

    The prompt is the conversation up to there, laid out as for training. Decoding is greedy, until the tokenizer's end
    token, one of the model's generation config, or ``max_new_tokens``, so it always ends.

    Not collective: the model is whole on one device.

    Args:
        model: a causal language model of transformers, with or without peft's adapters. It stays in evaluation mode.
        tokenizer: the one of its training.
        rows: conversations.
        device: where the model is.
        limit: maximum number of prompts; None: all.
        max_new_tokens: of an answer.
        batch: prompts that are answered together. They are padded on the left, and the padding is masked.
        render: how a conversation is written, as for training.

    Raises: WrongResult: the model's logits are not finite.
    """
    skipped: Counter[str] = Counter()
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    room = math.inf if longest is None else longest - max_new_tokens
    questions = list(islice(_questions(rows, tokenizer, room, skipped, render), limit))
    model.eval()
    with torch.no_grad():
        texts = _write(model, tokenizer, [prompt for prompt, _ in questions], device, max_new_tokens, batch)
    answers = tuple(
        Answer(expected=expected, text=text, found=parse(text))
        for (_, expected), text in zip(questions, texts, strict=True)
    )
    due = [answer for answer in answers if answer.expected is not None]
    counts = {
        "asked": len(due),
        "called": sum(has_call(answer.text) for answer in due),
        **{name: sum(answer.grade >= least for answer in due) for least, name in enumerate(_COUNTS, start=1)},
        "not_due": len(answers) - len(due),
        "unneeded": sum(has_call(answer.text) for answer in answers if answer.expected is None),
    }
    return CallScore(counts=counts, skipped=dict(skipped), answers=answers)


_COUNTS = ("well_formed", "right_function", "right_arguments")
"""By the grade of an answer, from 1."""


def _questions(
    rows: Iterable[Row], tokenizer: Any, room: float, skipped: Counter[str], render: Render
) -> Iterator[tuple[list[int], FunctionCall | None]]:
    for row in rows:
        try:
            parts = list(render(row))
        except ValueError:
            skipped["the chat template cannot write the row"] += 1
            continue
        calls = [place for place, part in enumerate(parts) if part.is_assistant and has_call(part.text)]
        place = calls[0] if calls else next(place for place, part in enumerate(parts) if part.is_assistant)
        before, expected = parts[:place], parse(parts[place].text) if calls else None
        if isinstance(expected, str):
            skipped["the call in the row is not well-formed"] += 1
            continue
        prompt: list[int] = []
        for segment, ids in zip(before, ids_of([segment.text for segment in before], tokenizer), strict=True):
            prompt += ids + [tokenizer.eos_token_id] * segment.ended
        if len(prompt) > room:
            skipped["the prompt is too long for the model"] += 1
            continue
        yield prompt, expected


def _write(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], device: torch.device, most: int, batch: int
) -> list[str]:
    """Return the model's answer to each prompt, of ``most`` tokens at most."""
    texts, ends = [""] * len(prompts), end_tokens(model, tokenizer)
    # Prompts of similar length together, for little padding; the longest first, so that one that does not fit into
    # the memory fails at once.
    ranked = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number]), number))
    for numbers in in_batches(ranked, batch):
        answers = _tokens(model, [prompts[number] for number in numbers], device, most, ends)
        for number, tokens in zip(numbers, answers, strict=True):
            texts[number] = tokenizer.decode(tokens, skip_special_tokens=False)
    return texts


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: the tokenizer's first, then those of the model's generation config."""
    listed = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = [listed] if isinstance(listed, int) else listed or []
    return list(dict.fromkeys([tokenizer.eos_token_id, *more]))


def _tokens(
    model: Any, prompts: Sequence[list[int]], device: torch.device, most: int, ends: Sequence[int]
) -> Iterator[list[int]]:
    """Yield the likeliest tokens after each prompt, up to an end token."""
    from transformers import GenerationConfig, LogitsProcessorList

    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), ends[0])
    mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for place, prompt in enumerate(prompts):
        ids[place, longest - len(prompt) :] = torch.tensor(prompt)
        mask[place, longest - len(prompt) :] = 1
    finite = torch.ones((), dtype=torch.bool, device=device)

    def check(_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        finite.logical_and_(logits.isfinite().all())
        return logits

    # Each setting that changes a token is given: an omitted one would be that of the model's own file.
    greedy = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it so
        max_new_tokens=most,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=list(ends),
        pad_token_id=ends[0],
    )
    found = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        generation_config=greedy,
        logits_processor=LogitsProcessorList([check]),
    )
    if not bool(finite):
        raise WrongResult("the model's logits are not finite: its weights are broken")
    for tokens in found[:, longest:].tolist():
        yield list(takewhile(lambda token: token not in ends, tokens))


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OF_A_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def load_adapter(folder: Path, device: torch.device, *, base: str | None = None) -> tuple[Any, Any, str]:
    """Load an adapter's folder, as peft's ``save_pretrained`` writes it, and its base model.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        device: where the model is placed.
        base: folder or hub name of the base model; by default the one in adapter_config.json.

    Returns: peft's ``PeftModel``, frozen, in evaluation mode; the tokenizer, from the adapter's folder if it has one,
        else the base's; and the folder or hub name of the base.

    Raises:
        EnvironmentBroken: a file or weight is missing, or adapter and base do not fit together.
        ImportError: a package is missing.
    """
    import peft  # noqa: F401  # before the base, which takes long

    try:
        named = base or json.loads((folder / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except OSError as error:
        raise EnvironmentBroken(
            f"{folder / CONFIG}: {error.strerror or error}; give the folder of a saved adapter, such as final/"
        ) from None
    except (ValueError, KeyError, TypeError):
        named = None
    if not named:
        raise EnvironmentBroken(f"{folder / CONFIG}: names no base model; give it with --base")
    _saved_weights(folder)  # before the base, which takes long
    model = _with_adapter(read_model(named, device, "auto", local=local_only(named)), folder, named)
    has_tokenizer = any((folder / name).is_file() for name in _OF_A_TOKENIZER)
    return model.to(device).eval(), tokenizer_for(folder if has_tokenizer else named), str(named)


def _saved_weights(folder: Path) -> set[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise EnvironmentBroken(f"{folder / WEIGHTS}: cannot be read: {first_line(str(error))}") from error


def _with_adapter(below: Any, folder: Path, base: str) -> Any:
    """Return peft's model with a folder's adapter. Each of its weights must be in the file, and each of those used.

    Raises: EnvironmentBroken.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import SafetensorError

    saved = _saved_weights(folder)  # peft would look on the hub for a file that is missing
    try:
        with warnings.catch_warnings():
            # Missing weights are an error below, not a warning.
            warnings.filterwarnings("ignore", message=".*missing adapter keys")
            model = PeftModel.from_pretrained(below, str(folder))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise EnvironmentBroken(f"{folder}: does not fit on {base}: {first_line(str(error))}") from error
    # Without looking for changed embeddings: that would ask the hub.
    needed = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    for names, what in ((needed - saved, "are not in the file"), (saved - needed, "do not exist in this model")):
        if names:
            raise EnvironmentBroken(
                f"{folder / WEIGHTS}: {len(names)} weights {what}, such as {min(names)}: it does not belong to {base}"
            )
    return model


def reload_adapter(base: Base, final: Path, device: torch.device, *, precision: str, seed: int) -> Any:
    """Return peft's model of a base with the adapters of a folder, whole on this rank, for evaluation only.

    All weights are in the dtype of the precision, as in the products of the training.

    Raises: WrongResult if the folder cannot be read, or the adapters do not fit.
    """
    below = make_base(base, device, precision=precision, seed=seed)
    try:
        model = _with_adapter(below, final, base.label)
    except EnvironmentBroken as error:
        raise WrongResult(
            f"{error}: the saved adapters cannot be loaded again. Check the file system, and the version of peft"
        ) from error
    for weight in model.parameters():
        weight.data = weight.data.to(device, DTYPES[precision])
    return model.eval()


def reloaded_loss(model: Any, packed: Packed, ranks: Ranks, rank: int, device: torch.device) -> float:
    """Return the mean loss over the loss mask, each rank with its part of the blocks.

    Collective: every rank of the group must call this.
    """
    whole = MaskedLoss(model)
    summed = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():
        for block in range(rank, len(packed), ranks.count):
            summed += whole(*packed.batch([block], device))[0].double()
    return sum(loss for [loss] in ranks.gather([float(summed)])) / int(packed.loss_mask.sum())


def choose_device(name: str | None) -> torch.device:
    """Return the device of this name; without one the first GPU, or the CPU where there is none.

    Raises: ValueError if there is no such device.
    """
    gpus = VisibleGpus().count()
    if name is None:
        return torch.device("cuda" if gpus else "cpu")
    allowed = ["cpu", *["cuda"] * bool(gpus), *(f"cuda:{index}" for index in range(gpus))]
    if name not in allowed:
        raise ValueError(f"allowed are {', '.join(allowed)}: torch sees {gpus} GPUs (nvidia-smi, CUDA_VISIBLE_DEVICES)")
    return torch.device(name)
