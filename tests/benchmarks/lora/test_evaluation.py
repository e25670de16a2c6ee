"""Greedy calls are scored by what they say; a model in a batch answers as one, and always ends."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from each import of_each
from programs import needs_modules
from torch import nn

from pytest_gpucluster.benchmarks.lora.dataset import BETWEEN, Row
from pytest_gpucluster.benchmarks.lora.evaluation import end_tokens, evaluate
from pytest_gpucluster.benchmarks.lora.function_calls import FunctionCall
from pytest_gpucluster.benchmarks.lora.packing import segments, tiny_tokenizer
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.errors import WrongResult

pytestmark = needs_modules("transformers")
ROWS = synthetic_rows(200, seed=0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(ROWS)


class Parrot(nn.Module):
    """Says the text that belongs to the end of its prompt, one token at a time, and then its end token for ever."""

    def __init__(self, tokenizer, answers, *, ends=True):
        super().__init__()
        self.tokenizer, self.answers, self.ends, self.calls = tokenizer, answers, ends, 0
        self.config = SimpleNamespace(max_position_embeddings=4096)

    def generate(self, *, input_ids, attention_mask, generation_config, logits_processor):
        assert (self.training, generation_config.do_sample) == (False, False)
        masked = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
        texts = [[token for token, counts in zip(ids, mask, strict=True) if counts] for ids, mask in masked]
        for _ in range(generation_config.max_new_tokens):
            self.calls += 1
            likely = torch.tensor([self.next(text) for text in texts])
            logits = self.logits(torch.nn.functional.one_hot(likely, len(self.tokenizer)).float())
            following = logits_processor(input_ids, logits).argmax(-1)
            input_ids = torch.cat([input_ids, following[:, None]], dim=1)
            texts = [[*text, int(token)] for text, token in zip(texts, following, strict=True)]
            if set(following.tolist()) <= set(generation_config.eos_token_id):
                break
        return input_ids

    def logits(self, right):
        return right

    def next(self, tokens):
        text = self.tokenizer.decode(tokens)
        # The last prompt that the text goes on from: so a text in which another one stands is no trap.
        prompt = max((prompt for prompt in self.answers if text.startswith(prompt)), key=len)
        left = self.tokenizer(self.answers[prompt])["input_ids"][
            len(tokens) - len(self.tokenizer(prompt)["input_ids"]) :
        ]
        return left[0] if left else (self.tokenizer.eos_token_id if self.ends else 99)


def row(call, city="Rome"):
    return Row(system="SYSTEM: x", chat=f"USER: {city}?{BETWEEN}ASSISTANT: {call} <|endoftext|>{BETWEEN}USER: and?")


def prompt_of(row):
    return next(segments(row)).text


def ask(tokenizer, model, rows, **sizes):
    return evaluate(model, tokenizer, rows, **{"device": CPU, "limit": None, "max_new_tokens": 64, **sizes})


def parrot(tokenizer, output=None, **more):
    """Say this to the one question that ``row`` asks."""
    return Parrot(tokenizer, {prompt_of(row(CALL)): f" {CALL if output is None else output}"}, **more)


CALL = '<functioncall> {"name": "heat", "arguments": \'{"city": "Rome", "days": 2}\'}'
OUTPUT = [
    (CALL, (1, 1, 1)),
    ('<functioncall> {"name": "heat", "arguments": {"days": 2.0, "city": "Rome"}}', (1, 1, 1)),
    (CALL.replace("Rome", "Oslo"), (1, 1, 0)),
    (CALL.replace(', "days": 2', ""), (1, 1, 0)),
    (CALL.replace("heat", "rain"), (1, 0, 0)),
    (CALL[:-1], (0, 0, 0)),
    (CALL + " Done.", (0, 0, 0)),
    ("It is hot.", (0, 0, 0)),
    ("", (0, 0, 0)),
]


@of_each("answered", OUTPUT)
def test_an_answer_counts_for_what_is_right_in_it(tokenizer, answered):
    output, counts = answered
    score = ask(tokenizer, parrot(tokenizer, output), [row(CALL)])
    names = ("asked", "well_formed", "right_function", "right_arguments")
    assert tuple(score.counts[name] for name in names) == (1, *counts)
    assert tuple(score.ratios().values())[:3] == counts
    [answer] = score.answers
    assert answer.text == f" {output}"
    assert answer.expected == FunctionCall(name="heat", arguments={"city": "Rome", "days": 2})


def test_answers_stand_in_the_order_of_the_rows_whatever_the_batch(tokenizer):
    cities = ["Rome", "Ouagadougou in Burkina Faso", "Oslo", "Lima"]
    rows = [row(CALL.replace("Rome", city), city) for city in cities]
    answers = {prompt_of(each): f" {CALL.replace('Rome', city)}" for each, city in zip(rows, cities, strict=True)}
    answers[prompt_of(rows[2])] = " I will not."
    for batch in (1, 3, 8):
        score = ask(tokenizer, Parrot(tokenizer, answers), rows, batch=batch)
        assert [answer.expected.arguments["city"] for answer in score.answers] == cities
        assert [answer.grade == 3 for answer in score.answers] == [True, True, False, True]


def test_what_cannot_be_asked_is_counted_by_its_reason_and_where_nothing_is_asked_nothing_is_a_pass(tokenizer):
    rows = [
        row("<functioncall> {broken"),
        Row(system="long " * 4000, chat=row(CALL).chat),
        row(CALL),
        row(CALL, "never reached"),
    ]
    score = ask(tokenizer, parrot(tokenizer), rows, limit=1)
    assert (score.counts["asked"], list(score.skipped.values())) == (1, [1, 1])
    score = ask(tokenizer, Parrot(tokenizer, {}), [])
    assert all(math.isnan(ratio) for ratio in score.ratios().values())


INTENT = [
    (CALL, "It is hot.", (1, 1, 1, 1)),
    ("I cannot.", "It is hot.", (0.5, math.nan, 0, 0)),
    ("<functioncall> {broken", CALL, (0.5, 0.5, 1, 2 / 3)),
    ("I cannot.", CALL, (0, 0, 0, 0)),
]


@of_each("answered", INTENT)
def test_where_no_call_is_due_the_first_answer_counts_for_the_intent_alone(tokenizer, answered):
    due, not_due, ratios = answered
    rows = [row(CALL), row("It is warm.", "Oslo")]
    model = Parrot(tokenizer, {prompt_of(rows[0]): f" {due}", prompt_of(rows[1]): f" {not_due}"})
    score = ask(tokenizer, model, rows)
    assert (score.counts["asked"], score.counts["not_due"]) == (1, 1)
    found = score.ratios()
    intent = [found[f"intent_{name}"] for name in ("accuracy", "precision", "recall", "f1")]
    assert intent == pytest.approx(list(ratios), nan_ok=True)
    right = due == CALL
    assert score.by_function() == {
        "heat": {"asked": 1, "well_formed": right, "right_function": right, "right_arguments": right}
    }
    assert [answer.right for answer in score.answers] == [right, not_due != CALL]


def test_each_end_token_of_the_generation_config_ends_an_answer(tokenizer):
    tokens, model = tokenizer(f" {CALL}")["input_ids"], parrot(tokenizer)
    model.generation_config = SimpleNamespace(eos_token_id=[tokens[9], tokenizer.eos_token_id])
    assert end_tokens(model, tokenizer) == [tokenizer.eos_token_id, tokens[9]]
    [answer] = ask(tokenizer, model, [row(CALL)]).answers
    assert answer.text == tokenizer.decode(tokens[: tokens.index(tokens[9])])
    for listed, ends in ((None, [0]), (7, [0, 7]), (0, [0])):
        model.generation_config.eos_token_id = listed
        assert end_tokens(model, tokenizer) == ends


def test_the_prompt_of_a_later_call_holds_the_answers_before_it(tokenizer):
    asked = Row(system="", chat=BETWEEN.join(["USER: Hi", "ASSISTANT: Hello!", "USER: Rome?", f"ASSISTANT: {CALL}"]))
    prompt = f"USER: Hi{BETWEEN}ASSISTANT: Hello!<|endoftext|>{BETWEEN}USER: Rome?{BETWEEN}ASSISTANT:"
    assert ask(tokenizer, Parrot(tokenizer, {prompt: f" {CALL}"}), [asked]).counts["right_arguments"] == 1


def test_a_model_that_never_ends_is_cut_off(tokenizer):
    model = parrot(tokenizer, ends=False)
    score = ask(tokenizer, model, [row(CALL)], max_new_tokens=80)
    assert (model.calls, score.counts["well_formed"]) == (80, 0)


def test_logits_that_are_not_finite_are_a_wrong_result(tokenizer):
    class Broken(Parrot):
        def logits(self, right):
            right[0, 5] = math.nan
            return right

    with pytest.raises(WrongResult, match="not finite"):
        ask(tokenizer, Broken(tokenizer, {prompt_of(row(CALL)): f" {CALL}"}), [row(CALL)])


def qwen2(vocab):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.5,  # large, so that the likeliest token is clearly so
    )
    return Qwen2ForCausalLM(config).eval()


def test_a_model_of_transformers_says_in_a_batch_what_it_says_to_each_prompt_without_a_cache(tokenizer):
    model = qwen2(len(tokenizer))
    score = ask(tokenizer, model, ROWS[:12], limit=6, max_new_tokens=12, batch=4)
    asked = ROWS[:6]
    assert len(score.answers) == 6
    for given, answer in zip(asked, score.answers, strict=True):
        prompt = tokens = tokenizer(prompt_of(given))["input_ids"]
        with torch.no_grad():
            for _ in range(12):
                tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
        assert answer.text == tokenizer.decode(tokens[len(prompt) :]).partition("<|endoftext|>")[0]
