"""Conversations as blocks of tokens: layout, loss mask, tokenizers.

Packed blocks have one length; only tokens of the assistant count in the loss. Nothing is padded, and attention is
plainly causal: a block may begin in the middle of a conversation and may hold several. Source: training on packed
blocks as torchtune and TRL name it; that a conversation sees the ones before it in its block is the price of static
shapes and flash attention. Or each block is one conversation, padded at its end, in which all tokens count.

A tokenizer is a tiny one that is trained on the rows, or the one that comes with a model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from pytest_gpucluster.benchmarks.lora.dataset import BETWEEN, END, LABELS, MALFORMED_RATIO, WITH_FUNCTIONS, Row
from pytest_gpucluster.benchmarks.lora.function_calls import CALL, FunctionCall, parse
from pytest_gpucluster.benchmarks.lora.hub import local_only
from pytest_gpucluster.benchmarks.lora.synthetic import Draws
from pytest_gpucluster.benchmarks.training.loader import in_batches
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a conversation that is tokenized by itself.

    Attributes:
        text: the part.
        is_assistant: it is the assistant's, and counts in the loss.
        ended: the end token follows it, and counts where it is the assistant's.
    """

    text: str
    is_assistant: bool
    ended: bool = False


Render: TypeAlias = Callable[[Row], Iterable[Segment]]
"""Write a conversation as parts. Raises: ValueError if it cannot be written."""


def segments(row: Row) -> Iterator[Segment]:
    """Yield a conversation part by part: what is given, then the assistant's text, and so on.

    ``ASSISTANT:`` is given; the assistant's text begins with the space after it. Turns are two empty lines apart, as
    in glaive's files, whatever stood between them in the row. A row that does not end with the assistant is closed by
    an end token that does not count.
    """
    given, first = row.system.strip(), not row.system.strip()
    for turn in row.turns:
        given += ("" if first else BETWEEN) + LABELS[turn.role]
        first = False
        if turn.role == "assistant":
            yield Segment(text=given, is_assistant=False)
            yield Segment(text=f" {turn.text}" if turn.text else "", is_assistant=True, ended=True)
            given = ""
        else:
            given += f" {turn.text}"
    if given:
        yield Segment(text=given, is_assistant=False, ended=True)


def rendering_of(name: str, tokenizer: Any) -> Render:
    """Return how rows are written: ``glaive``, as :func:`segments` does; or ``chat``, by the tokenizer's chat template.

    Raises: EnvironmentBroken if the tokenizer has no chat template.
    """
    if name == "glaive":
        return segments
    if not tokenizer.chat_template:
        raise EnvironmentBroken(
            "the model's tokenizer has no chat template: set lora.rendering=glaive (lora prepare: --rendering glaive)"
        )
    takes_tools = "tools" in str(tokenizer.chat_template)
    greeting = [{"role": "user", "content": "x"}]

    def write(messages: list[dict[str, Any]], tools: list[Any] | None = None, answer: bool = False) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=answer))

    # What the template writes before an answer; the first special token after it ends the answer.
    before = write(greeting, answer=True).removeprefix(write(greeting))
    special = re.compile("|".join(map(re.escape, tokenizer.all_special_tokens)))

    def render(row: Row) -> list[Segment]:
        messages, tools = _messages(row, takes_tools)
        try:
            given, *others = write(messages, tools or None).split(before)
        except Exception as error:  # of jinja2 and of the template itself
            raise ValueError(f"the chat template refuses it: {first_line(str(error))}") from error
        if len(others) != sum(message["role"] == "assistant" for message in messages):
            raise ValueError("a text in it looks like the beginning of an answer")
        found = []
        for other in others:
            end = special.search(other)
            text, closing = (other[: end.start()], end[0]) if end else (other, "")
            found += [Segment(text=given + before, is_assistant=False), Segment(text=text, is_assistant=True)]
            found.append(Segment(text=closing, is_assistant=True))
            given = other[len(text + closing) :]
        return [*found, Segment(text=given, is_assistant=False)]

    return render


def _messages(row: Row, takes_tools: bool) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return a conversation as chat templates take it. For one that takes no tools, functions and calls are texts."""
    system, tools = row.system.strip().removeprefix("SYSTEM:").strip(), list[Any]()
    if takes_tools:
        system, tools = _functions(system)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for turn in row.turns:
        call = parse(turn.text) if takes_tools and turn.role == "assistant" else None
        message: dict[str, Any] = {"role": "tool" if turn.role == "function" else turn.role, "content": turn.text}
        if isinstance(call, FunctionCall):
            function = {"name": call.name, "arguments": dict(call.arguments)}
            message["content"] = turn.text.partition(CALL)[0].strip()
            message["tool_calls"] = [{"type": "function", "function": function}]
        messages.append(message)
    return messages, tools


def _functions(system: str) -> tuple[str, list[Any]]:
    """Take the functions at the end of a system text out of it; without them it stays as it is."""
    text, _, rest = system.partition(WITH_FUNCTIONS.removeprefix("SYSTEM: ").strip())
    tools, rest = list[Any](), rest.strip()
    try:
        while rest:
            function, end = json.JSONDecoder().raw_decode(rest)
            tools.append({"type": "function", "function": function})
            rest = rest[end:].strip()
    except ValueError:
        tools = []
    return (text.strip(), tools) if tools else (system, [])


_AT_ONCE = 512
"""Rows that are passed to the tokenizer together: it spreads them over its threads."""

LONGEST_ROW = 8
"""Blocks that one conversation may fill; what is longer is cut off. Source: this suite's rule: 8 of 4096 tokens are the
context that Qwen2-7B was trained with."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """How the rows were packed.

    Attributes:
        rows: that were packed.
        tokens: of these rows, end tokens included.
        longest: tokens of the longest row, uncut.
        truncated: rows that were cut off.
        left_out: rows that the chat template could not write.
    """

    rows: int = 0
    tokens: int = 0
    longest: int = 0
    truncated: int = 0
    left_out: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Blocks of tokens.

    Attributes:
        tokens: int64, blocks x (sequence + 1): inputs are ``tokens[:, :-1]``, targets ``tokens[:, 1:]``.
        loss_mask: bool, blocks x sequence: which of the targets count in the loss: the assistant's, or if padded, all
            that are no padding.
        statistics: of the packing.
        padded: each block is one conversation, with padding at its end.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    statistics: Statistics
    padded: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def input_tokens(self, blocks: Sequence[int]) -> int:
        """Count the inputs of some blocks that are no padding."""
        return int(self.loss_mask[blocks].sum()) if self.padded else len(blocks) * self.loss_mask.shape[1]

    def batch(self, blocks: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and loss mask of some blocks on a device; if padded, cut to one more than the longest."""
        tokens, loss_mask = self.tokens[blocks], self.loss_mask[blocks]
        kept = int(loss_mask.sum(dim=1).max()) + 1 if self.padded else loss_mask.shape[1]
        return tokens[:, : kept + 1].to(device), loss_mask[:, :kept].to(device)


def pack(
    rows: Iterable[Row],
    tokenizer: Any,
    sequence: int,
    *,
    blocks: int | None = None,
    padded: bool = False,
    render: Render = segments,
) -> Packed:
    """Tokenize rows, concatenate them in their order, and cut that into blocks; or make one padded block of each.

    Args:
        rows: conversations.
        tokenizer: of transformers, with an end token.
        sequence: positions of a block; it holds one token more.
        blocks: stop at this number; the rows after them are not read. None takes all rows.
        padded: each row is a block, all of whose tokens count, cut off or padded at its end.
        render: how a row is written.

    Raises: EnvironmentBroken: the rows do not fill one block, or more than ``MALFORMED_RATIO`` of them cannot be
        written.
    """
    length = sequence + 1
    pieces: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    used = total = longest = truncated = left_out = 0
    most = length * (1 if padded else LONGEST_ROW)
    encoded = (one for chunk in in_batches(rows, _AT_ONCE) for one in encode(chunk, tokenizer, render))
    for tokens, loss_mask in encoded:
        if not tokens:
            left_out += 1
            continue
        used, longest, truncated = used + 1, max(longest, len(tokens)), truncated + (len(tokens) > most)
        kept = min(len(tokens), most)
        filler = length - kept if padded else 0
        pieces.append(torch.tensor(tokens[:kept] + [tokenizer.eos_token_id] * filler, dtype=torch.int32))
        masks.append(torch.tensor(([True] * kept if padded else loss_mask[:kept]) + [False] * filler))
        total += kept + filler
        if blocks is not None and total >= blocks * length:
            break
    if left_out > MALFORMED_RATIO * (used + left_out):
        raise EnvironmentBroken(
            f"{left_out} of {used + left_out} rows cannot be written by the chat template: it refuses them, or their "
            "texts look like parts of it; give other rows, or set lora.rendering=glaive"
        )
    count = total // length if blocks is None else min(total // length, blocks)
    if not count:
        raise EnvironmentBroken(
            f"{used} rows are {total} tokens, which do not fill one block of {length}: give more rows, or a shorter"
            f" sequence than {sequence}"
        )
    return Packed(
        tokens=torch.cat(pieces)[: count * length].view(count, length).long(),
        loss_mask=torch.cat(masks)[: count * length].view(count, length)[:, 1:].contiguous(),
        statistics=Statistics(rows=used, tokens=total, longest=longest, truncated=truncated, left_out=left_out),
        padded=padded,
    )


@lru_cache(maxsize=2)
def order(seed: int, epoch: int, blocks: int) -> tuple[int, ...]:
    """Return the order of the blocks in an epoch: the same on every rank and for every world size."""
    numbers = list(range(blocks))
    Draws(seed, "order", epoch).shuffle(numbers)
    return tuple(numbers)


def global_batch(step: int, *, size: int, blocks: int, seed: int) -> list[int]:
    """Return the blocks of a step, of all ranks together. After the last block comes the next epoch, in its own order.

    It depends on the step alone, so that a resumed training continues with the same blocks.

    Args:
        step: from 0.
        size: blocks of a step: the global batch, whatever the world size.
        blocks: how many there are.
        seed: of the order.
    """
    places = (divmod(step * size + offset, blocks) for offset in range(size))
    return [order(seed, epoch, blocks)[place] for epoch, place in places]


def share(batch: Sequence[int], *, rank: int, world_size: int) -> list[int]:
    """Return the part of a global batch for a rank of a group, in their order: the first ranks may have one more.

    >>> [share(range(8), rank=rank, world_size=3) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    each, more = divmod(len(batch), world_size)
    first = rank * each + min(rank, more)
    return list(batch[first : first + each + (rank < more)])


def encode(rows: Sequence[Row], tokenizer: Any, render: Render = segments) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the tokens of each row, and which of them count in the loss: the assistant's, and the end token after them.
    A row that cannot be written has no tokens.

    Each part of a row is tokenized by itself, so that no token belongs half to the assistant.
    """
    parts_of_rows: list[list[Segment]] = []
    for row in rows:
        try:
            parts_of_rows.append(list(render(row)))
        except ValueError:
            parts_of_rows.append([])
    # No special token of its own: a model that begins each text with one would have it at every turn.
    ids = iter(ids_of([segment.text for parts in parts_of_rows for segment in parts], tokenizer))
    end = tokenizer.eos_token_id
    for parts in parts_of_rows:
        tokens: list[int] = []
        loss_mask: list[bool] = []
        for segment in parts:
            piece = list(next(ids)) + [end] * segment.ended
            tokens += piece
            loss_mask += [segment.is_assistant] * len(piece)
        yield tokens, loss_mask


def ids_of(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the tokens of each text, without those that a model adds at the start of each text."""
    # Without verbose=False the tokenizer warns of texts longer than its model's context, which blocks cut anyway.
    if not texts:
        return []
    found: list[list[int]] = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
    return found


PAD = "<|pad|>"


def tiny_tokenizer(rows: Iterable[Row], vocab: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the rows: it can encode any text, and equal rows give equal tokenizers.

    Args:
        rows: to train on.
        vocab: number of tokens, all 256 bytes and the two for the end and for padding included.

    Raises: ValueError: the rows are too few for this number of tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bare.train_from_iterator(("".join(segment.text for segment in segments(row)) for row in rows), trainer)
    if bare.get_vocab_size() != vocab:
        raise ValueError(f"the rows give {bare.get_vocab_size()} tokens, and {vocab} are required: give more rows")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it so
        tokenizer_object=bare, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def tokenizer_for(model: str | Path) -> Any:
    """Load the tokenizer of a model, from a folder or from the hub.

    With HF_HUB_OFFLINE, or where the hub does not answer, only the hub's cache is used.

    Raises: EnvironmentBroken: there is no such tokenizer, or it has no end token.
    """
    from transformers import AutoTokenizer

    local = local_only(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        where = "it is no folder here and not in the hub's cache; " if local and not Path(model).exists() else ""
        raise EnvironmentBroken(
            f"{model}: no tokenizer can be loaded from it ({first_line(str(error))}); {where}give the folder of"
            " a model, with its tokenizer.json and tokenizer_config.json"
        ) from error
    if tokenizer.eos_token_id is None:
        raise EnvironmentBroken(f"{model}: its tokenizer has no end token (eos_token), which ends each answer")
    return tokenizer


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a sha256 of what determines a tokenizer's output: its tokens, merges and rules."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{rules}\0{tokenizer.eos_token_id}".encode()).hexdigest()
