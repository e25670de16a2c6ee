"""Blocks hold the conversations one after another, and exactly what the assistant says is loss_mask. The tiny tokenizer
is the same wherever it is trained; those of models are loaded from folders."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from each import of_each
from forked_ranks import on_ranks
from programs import needs_modules

from pytest_gpucluster.benchmarks.lora.dataset import Row
from pytest_gpucluster.benchmarks.lora.hub import ANSWER_SECONDS
from pytest_gpucluster.benchmarks.lora.packing import (
    LONGEST_ROW,
    encode,
    global_batch,
    order,
    pack,
    segments,
    share,
    tiny_tokenizer,
    tokenizer_fingerprint,
    tokenizer_for,
)
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.errors import EnvironmentBroken

pytestmark = needs_modules("transformers")
ROWS = synthetic_rows(200, seed=0)
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(ROWS)


def test_of_a_row_just_the_answers_and_their_ends_are_judged(tokenizer):
    row = next(row for row in ROWS if len(row.turns) == 4)
    [(tokens, loss_mask)] = encode([row], tokenizer)
    output = tokenizer.decode([token for token, counts in zip(tokens, loss_mask, strict=True) if counts])
    assert output == "".join(f" {turn.text}{END}" for turn in row.turns if turn.role == "assistant")
    given = tokenizer.decode([token for token, counts in zip(tokens, loss_mask, strict=True) if not counts])
    assert given == "".join(piece.text for piece in segments(row) if not piece.is_assistant)
    assert tokens[-1] == tokenizer.eos_token_id


def test_a_row_that_ends_with_a_question_is_closed_and_that_is_not_judged(tokenizer):
    [(tokens, loss_mask)] = encode([Row(system="", chat="USER: a\nASSISTANT: b\nUSER: c")], tokenizer)
    assert tokenizer.decode(tokens) == f"USER: a\n\n\nASSISTANT: b{END}\n\n\nUSER: c{END}"
    assert not loss_mask[-1]


@of_each("sequence", [64, 256, 1000])
def test_the_judged_targets_of_all_blocks_are_what_the_assistant_says_and_every_token_counts(tokenizer, sequence):
    packed, values = pack(ROWS, tokenizer, sequence), list(encode(ROWS, tokenizer))
    stream = [token for tokens, _ in values for token in tokens]
    counts = [each for _, loss_mask in values for each in loss_mask]
    blocks = len(stream) // (sequence + 1)
    assert (packed.tokens.shape, packed.tokens.dtype) == ((blocks, sequence + 1), torch.int64)
    assert (packed.loss_mask.shape, packed.loss_mask.dtype) == ((blocks, sequence), torch.bool)
    assert packed.tokens.flatten().tolist() == stream[: blocks * (sequence + 1)]
    for block in range(blocks):
        start = block * (sequence + 1)
        assert packed.loss_mask[block].tolist() == counts[start + 1 : start + sequence + 1]
    found = packed.statistics
    assert (found.rows, found.tokens) == (200, len(stream))
    assert found.longest == max(len(tokens) for tokens, _ in values)


def test_as_many_blocks_as_are_wanted_are_made_of_as_few_rows(tokenizer):
    everything, some = pack(ROWS, tokenizer, 128), pack(iter(ROWS), tokenizer, 128, blocks=5)
    assert torch.equal(some.tokens, everything.tokens[:5])
    assert torch.equal(some.loss_mask, everything.loss_mask[:5])
    assert some.statistics.rows < 10
    assert len(pack(ROWS, tokenizer, 128, blocks=10**6)) == len(everything)


def test_padded_each_block_is_one_row_whose_tokens_all_count_cut_to_the_longest_of_a_batch(tokenizer):
    packed, rows = pack(ROWS, tokenizer, 256, padded=True), [tokens for tokens, _ in encode(ROWS, tokenizer)]
    assert len(packed) == len(ROWS)
    for block, tokens in enumerate(rows):
        kept = tokens[:257]
        assert packed.tokens[block].tolist() == kept + [tokenizer.eos_token_id] * (257 - len(kept))
        assert packed.loss_mask[block].tolist() == [place < len(kept) - 1 for place in range(256)]
        assert packed.input_tokens([block]) == len(kept) - 1
    short = sorted(range(len(rows)), key=lambda block: len(rows[block]))[:2]
    tokens, loss_mask = packed.batch(short, torch.device("cpu"))
    assert tokens.shape == (2, len(rows[short[1]]) + 1)
    assert loss_mask.shape == (2, len(rows[short[1]]))
    truncated = sum(len(tokens) > 257 for tokens in rows)
    assert 0 < packed.statistics.truncated == truncated < len(rows)
    assert len(pack(ROWS, tokenizer, 256, padded=True, blocks=3)) == 3


def test_of_a_row_that_would_fill_many_blocks_the_first_ones_are_kept(tokenizer):
    long = Row(system="", chat="USER: a\nASSISTANT: " + "b c " * 100_000)
    packed = pack([long, *ROWS], tokenizer, 128)
    [(tokens, _)] = encode([long], tokenizer)
    assert packed.tokens.flatten()[: LONGEST_ROW * 129].tolist() == tokens[: LONGEST_ROW * 129]
    assert (packed.statistics.truncated, packed.statistics.longest) == (1, len(tokens))
    assert packed.statistics.tokens < 100_000 < len(tokens)


@of_each("given", [(ROWS[:1], 10_000), ([], 8)])
def test_rows_that_fill_no_block_are_an_error(tokenizer, given):
    with pytest.raises(EnvironmentBroken, match=rf"one block.* {given[1] + 1}: give more rows"):
        pack(given[0], tokenizer, given[1])


def test_the_order_is_of_all_blocks_changes_with_the_epoch_and_the_seed_and_is_the_same_for_ever():
    assert order(0, 0, 10) == (4, 8, 6, 3, 5, 2, 1, 7, 9, 0)
    assert sorted(order(3, 4, 100)) == list(range(100))
    assert len({order(0, 0, 100), order(0, 1, 100), order(1, 0, 100)}) == 3


def test_the_steps_go_through_all_blocks_epoch_by_epoch():
    steps = [global_batch(step, size=4, blocks=10, seed=7) for step in range(5)]
    assert [block for step in steps for block in step] == [*order(7, 0, 10), *order(7, 1, 10)]
    # More than an epoch in one step: the tiny data of a rehearsal.
    assert Counter(global_batch(0, size=25, blocks=10, seed=7)).most_common(1)[0][1] == 3


@of_each("world_size", [1, 2, 3, 5, 7, 16])
def test_whatever_the_world_size_the_ranks_share_the_same_global_batch(world_size):
    batch = global_batch(3, size=16, blocks=50, seed=1)
    shares = [share(batch, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [block for each in shares for block in each] == batch
    assert {len(each) for each in shares} <= {16 // world_size, -(-16 // world_size)}


ROW = Row(
    system="SYSTEM: Be brief.\n",
    chat="USER: One?\nASSISTANT: Two. <|endoftext|>\n\nFUNCTION RESPONSE: 3\n\n\n\nASSISTANT: Four <|endoftext|>",
)


def test_what_is_given_and_what_is_reported_take_turns():
    assert [(piece.text, piece.is_assistant) for piece in segments(ROW)] == [
        ("SYSTEM: Be brief.\n\n\nUSER: One?\n\n\nASSISTANT:", False),
        (" Two.", True),
        ("\n\n\nFUNCTION RESPONSE: 3\n\n\nASSISTANT:", False),
        (" Four", True),
    ]


def test_without_a_system_text_with_an_answer_without_words_and_with_a_last_question():
    pieces = segments(Row(system=" ", chat="USER: a\nASSISTANT:\nUSER: b\nASSISTANT: c\nUSER: d?"))
    assert [(piece.text, piece.is_assistant) for piece in pieces] == [
        ("USER: a\n\n\nASSISTANT:", False),
        ("", True),
        ("\n\n\nUSER: b\n\n\nASSISTANT:", False),
        (" c", True),
        ("\n\n\nUSER: d?", False),
    ]


def test_it_has_as_many_tokens_as_asked_for_an_end_and_a_padding_and_keeps_any_text(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 512
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token, tokenizer.pad_token_id) == (
        "<|endoftext|>",
        0,
        "<|pad|>",
        1,
    )
    for text in [
        "".join(piece.text for piece in segments(ROWS[0])),
        "Größe 東京 \U0001f600 \x00\t\n  x",
        "",
        "  two  spaces ,and a comma .",
    ]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def trained_on_one_thread(rank):
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    return tokenizer_fingerprint(tiny_tokenizer(synthetic_rows(200, seed=0)))


def test_another_process_trains_the_same_one_with_any_number_of_threads_and_other_rows_give_another(tokenizer):
    assert on_ranks(1, trained_on_one_thread) == [tokenizer_fingerprint(tokenizer)]
    assert tokenizer_fingerprint(tiny_tokenizer(ROWS[:150])) != tokenizer_fingerprint(tokenizer)
    with pytest.raises(ValueError, match=r"tokens, and 5000"):
        tiny_tokenizer(ROWS[:2], vocab=5000)


def test_the_tokenizer_of_a_folder_is_the_one_that_was_saved_and_it_must_have_an_end(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = tokenizer_for(tmp_path)
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert loaded(ROWS[3].chat)["input_ids"] == tokenizer(ROWS[3].chat)["input_ids"]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"eos_token"', '"an_eos_token"'))
    with pytest.raises(EnvironmentBroken, match=r"its tokenizer"):
        tokenizer_for(tmp_path)


def test_a_model_without_a_tokenizer_is_an_error(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("folder", "me/nothing"):
        with pytest.raises(EnvironmentBroken, match=rf"^{name}: .*tokenizer can"):
            tokenizer_for(name)


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    asked = []

    def silent(*_, timeout, **__):
        asked.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", silent)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvironmentBroken, match=r"^me/.*tokenizer can"):
        tokenizer_for("me/nothing")
    assert asked == [ANSWER_SECONDS]
