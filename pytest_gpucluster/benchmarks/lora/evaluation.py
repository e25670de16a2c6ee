"""Does a model call the right function with the right arguments? Asked on conversations that it was not trained on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.footprint import memory_returned
from pytest_gpucluster.benchmarks.lora.function_calls import FunctionCall, NoCall, has_call, parse, same_json
from pytest_gpucluster.benchmarks.lora.packing import ids_of
from pytest_gpucluster.benchmarks.lora.rendering import Segment, segments
from pytest_gpucluster.benchmarks.lora.rows import Row
from pytest_gpucluster.benchmarks.ranks import Ranks
from pytest_gpucluster.errors import WrongResult


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model said where a call was due.

    Attributes:
        expected: the call that stands in the conversation.
        text: what the model said instead, or just so.
        found: the call in it, or why it is none.
    """

    expected: FunctionCall
    text: str
    found: FunctionCall | NoCall

    @property
    def well_formed(self) -> bool:
        """Tell whether it is a call that a program can read."""
        return isinstance(self.found, FunctionCall)

    @property
    def right_function(self) -> bool:
        """Tell whether it calls the function that is due."""
        return isinstance(self.found, FunctionCall) and self.found.name == self.expected.name

    @property
    def right_arguments(self) -> bool:
        """Tell whether it calls that function with exactly the arguments that are due, compared as JSON values."""
        if not isinstance(self.found, FunctionCall) or not self.right_function:
            return False
        try:
            return same_json(self.found.arguments, self.expected.arguments)
        except RecursionError:
            return False


@dataclass(frozen=True, kw_only=True)
class CallScore:
    """How many calls were asked for, and how many of them came.

    Attributes:
        asked: conversations in which the model was asked for a call.
        well_formed: answers that are a well-formed call.
        right_function: that are, to the function that is due.
        right_arguments: that are, with the arguments that are due.
        unasked: conversations that were left out, by the reason.
        answers: what the model said, in the order of the rows.
    """

    asked: int
    well_formed: int
    right_function: int
    right_arguments: int
    unasked: Mapping[str, int]
    answers: tuple[Answer, ...] = ()

    def ratios(self) -> dict[str, float]:
        """Return the parts of ``asked``, by the name of the count; NaN if nothing was asked."""
        return {
            name: getattr(self, name) / self.asked if self.asked else math.nan
            for name in ("well_formed", "right_function", "right_arguments")
        }


@dataclass(frozen=True, kw_only=True)
class _Question:
    prompt: list[int]
    expected: FunctionCall


def evaluate(
    model: Any,
    tokenizer: Any,
    rows: Iterable[Row],
    *,
    device: torch.device,
    limit: int | None,
    max_new_tokens: int,
    batch: int = 8,
    group: dist.ProcessGroup | None = None,
    progress: Callable[..., None] | None = None,
) -> CallScore:
    """Let a model write the first call of each conversation, and hold it against the one that stands there.

    The prompt is the conversation up to ``ASSISTANT:``, laid out as for training. The model takes the likeliest token
    each time, until the end token or ``max_new_tokens``. So it ends in any case.

    A model on one device needs no group, and ranks may evaluate one each, by themselves. A model whose parameters are
    sharded over ranks (FSDP2) gathers them at each token: then it is collective, and every rank of the group must call
    this with the same rows and sizes. The first rank's tokens count on all of them, so that all take equally many
    steps. The model must be the module that was sharded last, and its forward must return logits.

    Args:
        model: a causal language model of transformers, with or without peft's adapters. Its mode is put back.
        tokenizer: the one that it was trained with.
        rows: conversations; those in which nothing is called are left out.
        device: where the model is.
        limit: calls to ask for, at most; None: all.
        max_new_tokens: of an answer, at most.
        batch: prompts that are answered together. They are padded on the left, and the padding is masked.
        group: the ranks that the model is sharded over.
        progress: told the calls that were asked for, and how many there are.

    Raises:
        WrongResult: the model's logits are not finite.
        ValueError: a size is below 1, or the tokenizer has no end token.
    """
    if max_new_tokens < 1 or batch < 1 or (limit is not None and limit < 1):
        raise ValueError(f"limit, max_new_tokens and batch must be at least 1: {limit}, {max_new_tokens}, {batch}")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end token (eos_token)")
    unasked: Counter[str] = Counter()
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    room = math.inf if longest is None else longest - max_new_tokens
    questions = list(islice(_questions(rows, tokenizer, room, unasked), limit))
    was_training = model.training
    model.eval()
    try:
        with memory_returned(), torch.no_grad():
            writer = _Writer(model, tokenizer, device, max_new_tokens, group)
            texts = writer.write([question.prompt for question in questions], batch, progress)
    finally:
        model.train(was_training)
        # A traceback that is kept keeps this frame, and a gloo group that outlives its end aborts the process.
        del group
    answers = tuple(
        Answer(expected=question.expected, text=text, found=parse(text))
        for question, text in zip(questions, texts, strict=True)
    )
    return CallScore(
        asked=len(answers),
        well_formed=sum(answer.well_formed for answer in answers),
        right_function=sum(answer.right_function for answer in answers),
        right_arguments=sum(answer.right_arguments for answer in answers),
        unasked=dict(unasked),
        answers=answers,
    )


def _questions(rows: Iterable[Row], tokenizer: Any, room: float, unasked: Counter[str]) -> Iterable[_Question]:
    for row in rows:
        pieces: list[Segment] = []
        for piece in segments(row):
            if piece.judged and has_call(piece.text):
                expected = parse(piece.text)
                break
            pieces.append(piece)
        else:
            unasked["nothing is called"] += 1
            continue
        if isinstance(expected, NoCall):
            unasked["the call in the row is not well-formed"] += 1
            continue
        prompt: list[int] = []
        for piece, ids in zip(pieces, ids_of([piece.text for piece in pieces], tokenizer), strict=True):
            prompt += ids + ([tokenizer.eos_token_id] if piece.judged else [])
        if len(prompt) > room:
            unasked["the prompt is too long for the model"] += 1
            continue
        yield _Question(prompt=prompt, expected=expected)


class _Writer:
    def __init__(
        self, model: Any, tokenizer: Any, device: torch.device, most: int, group: dist.ProcessGroup | None
    ) -> None:
        self._model, self._tokenizer, self._device, self._most = model, tokenizer, device, most
        self._end: int = tokenizer.eos_token_id
        self._ranks = None if group is None else Ranks(group, device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)

    def write(self, prompts: Sequence[list[int]], batch: int, progress: Callable[..., None] | None) -> list[str]:
        """Return what the model says to each prompt."""
        texts = [""] * len(prompts)
        # Of nearly the same length together, for little padding; the longest first, so that one that does not fit into
        # the memory ends it at once.
        ranked = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number]), number))
        for start in range(0, len(ranked), batch):
            numbers = ranked[start : start + batch]
            for number, tokens in zip(numbers, self._tokens([prompts[number] for number in numbers]), strict=True):
                said = tokens[: tokens.index(self._end)] if self._end in tokens else tokens
                texts[number] = self._tokenizer.decode(said, skip_special_tokens=False)
            if progress is not None:
                progress(start + len(numbers), len(ranked))
        # Only now: a rank that left in the middle would leave the others waiting.
        if not bool(self._finite):
            raise WrongResult("the model's logits are not finite: its weights are broken")
        return texts

    def _tokens(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self._end)
        mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for place, prompt in enumerate(prompts):
            ids[place, longest - len(prompt) :] = torch.tensor(prompt)
            mask[place, longest - len(prompt) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=self._device)
        written: list[torch.Tensor] = []
        cache = None
        for _ in range(self._most):
            found = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits, cache = found.logits[:, -1], found.past_key_values
            self._finite &= logits.isfinite().all()
            following = self._agreed(logits.argmax(-1)).masked_fill(done, self._end)
            written.append(following)
            done |= following == self._end
            if bool(done.all()):
                break
            ids = following[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = positions[:, -1:] + 1
        tokens: list[list[int]] = torch.stack(written, dim=1).tolist()
        return tokens

    def _agreed(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._ranks is None:
            return tokens
        return torch.tensor(self._ranks.of_first(tokens.tolist()), device=self._device).long()
