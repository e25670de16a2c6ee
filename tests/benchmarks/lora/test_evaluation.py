"""Greedy calls are scored by what they say; a model in many places answers as one, and always ends."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pytest_gpucluster.benchmarks.lora.conversation import BETWEEN
from pytest_gpucluster.benchmarks.lora.evaluation import CallScore, evaluate
from pytest_gpucluster.benchmarks.lora.function_calls import FunctionCall, parse
from pytest_gpucluster.benchmarks.lora.rendering import segments
from pytest_gpucluster.benchmarks.lora.rows import Row
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.benchmarks.lora.tokenizer import tiny_tokenizer
from pytest_gpucluster.errors import WrongResult

transformers = pytest.importorskip("transformers")
ROWS = synthetic_rows(200, seed=0)
CPU = torch.device("cpu")
DEADLINE_SECONDS = 240


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(ROWS)


class Parrot(nn.Module):
    """Says the text that belongs to the end of its prompt, one token at a time, and then its end token for ever.

    Its cache is what it has been given so far, so that a wrong mask, position or order of tokens shows.
    """

    def __init__(self, tokenizer, answers, *, ends=True):
        super().__init__()
        self.tokenizer, self.answers, self.ends, self.calls = tokenizer, answers, ends, 0
        self.config = SimpleNamespace(max_position_embeddings=4096)

    def forward(self, *, input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep):
        self.calls += 1
        assert not self.training
        assert (use_cache, logits_to_keep) == (True, 1)
        before = past_key_values if past_key_values is not None else [[] for _ in input_ids]
        logits = torch.zeros(len(input_ids), 1, len(self.tokenizer))
        history = []
        for place, ids in enumerate(input_ids.tolist()):
            new = attention_mask[place, -len(ids) :].tolist()
            kept = [token for token, counts in zip(ids, new, strict=True) if counts]
            assert position_ids[place, -1] == len(before[place]) + len(kept) - 1
            history.append(before[place] + kept)
            logits[place, 0, self.next(history[-1])] = 1.0
        return SimpleNamespace(logits=logits, past_key_values=history)

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


CALL = '<functioncall> {"name": "heat", "arguments": \'{"city": "Rome", "days": 2}\'}'
SAID = {
    "the same": (CALL, (1, 1, 1)),
    "another order, and numbers by value": (
        '<functioncall> {"name": "heat", "arguments": {"days": 2.0, "city": "Rome"}}',
        (1, 1, 1),
    ),
    "other arguments": (CALL.replace("Rome", "Oslo"), (1, 1, 0)),
    "an argument less": (CALL.replace(', "days": 2', ""), (1, 1, 0)),
    "another function with the same arguments": (CALL.replace("heat", "rain"), (1, 0, 0)),
    "not well-formed": (CALL[:-1], (0, 0, 0)),
    "more after it": (CALL + " Done.", (0, 0, 0)),
    "no call": ("It is hot.", (0, 0, 0)),
    "nothing": ("", (0, 0, 0)),
}


@pytest.mark.parametrize(("said", "counts"), SAID.values(), ids=SAID)
def test_an_answer_counts_for_what_is_right_in_it(tokenizer, said, counts):
    model = Parrot(tokenizer, {prompt_of(row(CALL)): f" {said}"})
    score = evaluate(model, tokenizer, [row(CALL)], device=CPU, limit=None, max_new_tokens=64)
    assert (score.asked, score.well_formed, score.right_function, score.right_arguments) == (1, *counts)
    assert score.ratios() == dict(
        zip(("well_formed", "right_function", "right_arguments"), map(float, counts), strict=True)
    )
    [answer] = score.answers
    assert answer.text == f" {said}"
    assert answer.expected == FunctionCall(name="heat", arguments={"city": "Rome", "days": 2})


def test_answers_stand_in_the_order_of_the_rows_whatever_the_batch(tokenizer):
    cities = ["Rome", "Ouagadougou in Burkina Faso", "Oslo", "Lima"]
    rows = [row(CALL.replace("Rome", city), city) for city in cities]
    answers = {prompt_of(each): f" {CALL.replace('Rome', city)}" for each, city in zip(rows, cities, strict=True)}
    answers[prompt_of(rows[2])] = " I will not."
    for batch in (1, 3, 8):
        model = Parrot(tokenizer, answers)
        told = []
        score = evaluate(
            *(model, tokenizer, rows),
            device=CPU,
            limit=None,
            max_new_tokens=64,
            batch=batch,
            progress=lambda step, of, told=told: told.append((step, of)),
        )
        assert [answer.expected.arguments["city"] for answer in score.answers] == cities
        assert [answer.right_arguments for answer in score.answers] == [True, True, False, True]
        assert told[-1] == (4, 4)
        assert len(told) == math.ceil(4 / batch)


def test_what_cannot_be_asked_is_counted_by_its_reason(tokenizer):
    rows = [
        row("Hello."),
        row("<functioncall> {broken"),
        Row(system="long " * 4000, chat=row(CALL).chat),
        row(CALL),
        row(CALL, "never reached"),
    ]
    model = Parrot(tokenizer, {prompt_of(row(CALL)): f" {CALL}"})
    score = evaluate(model, tokenizer, rows, device=CPU, limit=1, max_new_tokens=64)
    assert score.asked == 1
    assert score.unasked == {
        "nothing is called": 1,
        "the call in the row is not well-formed": 1,
        "the prompt is too long for the model": 1,
    }


def test_where_nothing_is_asked_nothing_is_a_pass(tokenizer):
    score = evaluate(Parrot(tokenizer, {}), tokenizer, [row("Hi.")], device=CPU, limit=None, max_new_tokens=4)
    assert score.asked == 0
    assert all(math.isnan(ratio) for ratio in score.ratios().values())


def test_the_prompt_of_a_later_call_holds_the_answers_before_it(tokenizer):
    chat = BETWEEN.join(["USER: Hi", "ASSISTANT: Hello!", "USER: Rome?", f"ASSISTANT: {CALL}"])
    asked = Row(system="", chat=chat)
    prompt = f"USER: Hi{BETWEEN}ASSISTANT: Hello!<|endoftext|>{BETWEEN}USER: Rome?{BETWEEN}ASSISTANT:"
    score = evaluate(
        Parrot(tokenizer, {prompt: f" {CALL}"}), tokenizer, [asked], device=CPU, limit=None, max_new_tokens=64
    )
    assert score.right_arguments == 1


def test_a_model_that_never_ends_is_cut_off(tokenizer):
    model = Parrot(tokenizer, {prompt_of(row(CALL)): f" {CALL}"}, ends=False)
    score = evaluate(model, tokenizer, [row(CALL)], device=CPU, limit=None, max_new_tokens=80)
    assert model.calls == 80
    assert score.well_formed == 0


def test_the_model_keeps_its_mode_also_when_it_fails(tokenizer):
    for training in (True, False):
        model = Parrot(tokenizer, {prompt_of(row(CALL)): f" {CALL}"}).train(training)
        evaluate(model, tokenizer, [row(CALL)], device=CPU, limit=None, max_new_tokens=2)
        assert model.training is training
        with pytest.raises(ValueError, match=r"max\(\)"):
            evaluate(model, tokenizer, [row(CALL, "Oslo")], device=CPU, limit=None, max_new_tokens=2)
        assert model.training is training


def test_logits_that_are_not_finite_are_a_wrong_result(tokenizer):
    class Broken(Parrot):
        def forward(self, **given):
            found = super().forward(**given)
            found.logits[0, 0, 5] = math.nan
            return found

    with pytest.raises(WrongResult, match="not finite"):
        evaluate(
            Broken(tokenizer, {prompt_of(row(CALL)): f" {CALL}"}),
            *(tokenizer, [row(CALL)]),
            device=CPU,
            limit=None,
            max_new_tokens=4,
        )


@pytest.mark.parametrize("sizes", [{"limit": 0}, {"max_new_tokens": 0}, {"batch": 0}])
def test_sizes_below_1_are_refused(tokenizer, sizes):
    with pytest.raises(ValueError, match="at least 1"):
        evaluate(None, tokenizer, [], **{"device": CPU, "limit": 1, "max_new_tokens": 1, **sizes})


def qwen2(vocab):
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
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
    return transformers.Qwen2ForCausalLM(config).eval()


def test_a_model_of_transformers_says_in_a_batch_what_its_own_generate_says_to_each_prompt(tokenizer):
    model = qwen2(len(tokenizer))
    score = evaluate(model, tokenizer, ROWS[:12], device=CPU, limit=6, max_new_tokens=12, batch=4)
    asked = [row for row in ROWS[:12] if any(isinstance(parse(turn.text), FunctionCall) for turn in row.turns)][:6]
    assert score.asked == 6
    for given, answer in zip(asked, score.answers, strict=True):
        prompt = torch.tensor([tokenizer(prompt_of(given))["input_ids"]])
        said = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )[0, prompt.shape[1] :]
        assert answer.text == tokenizer.decode(said).partition("<|endoftext|>")[0]


SCRIPT = """
import gc, json, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, {folder!r})
from test_evaluation import CPU, ROWS, CALL, Parrot, prompt_of, qwen2, row, tiny_tokenizer, evaluate

rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=world_size)
tokenizer = tiny_tokenizer(ROWS)
sizes = dict(device=CPU, limit=4, max_new_tokens=12, batch=3, group=dist.group.WORLD)
model = qwen2(len(tokenizer))
for block in model.model.layers:
    fully_shard(block)
fully_shard(model)
print("SAID", json.dumps([answer.text for answer in evaluate(model, tokenizer, ROWS, **sizes).answers]), flush=True)
# Each rank would say something else, and end elsewhere: what rank 0 says counts.
parrot = Parrot(tokenizer, {{prompt_of(row(CALL)): f" {{CALL}}"}})
parrot.next = lambda tokens, next=parrot.next: next(tokens) if rank == 0 else 7
score = evaluate(parrot, tokenizer, [row(CALL)], **(sizes | dict(max_new_tokens=64)))
print("SAID", json.dumps([score.right_arguments, parrot.calls]), flush=True)
del model, parrot
gc.collect()
dist.destroy_process_group()
"""


def test_ranks_that_share_a_model_take_the_same_steps_and_say_what_one_device_says(tokenizer, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(SCRIPT).format(folder=os.path.dirname(__file__)), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    outputs = [tmp_path / f"output{rank}.txt" for rank in range(2)]
    processes = []
    try:
        for rank, output in enumerate(outputs):
            command = [sys.executable, str(script), str(rank), "2", str(tmp_path / "store")]
            with output.open("wb") as stream:
                processes.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment))
        end = time.monotonic() + DEADLINE_SECONDS
        codes = [process.wait(timeout=max(0.1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [output.read_text(encoding="utf-8", errors="replace") for output in outputs]
    assert codes == [0, 0], "\n".join(texts)
    told = [
        [json.loads(line.removeprefix("SAID ")) for line in text.splitlines() if line.startswith("SAID ")]
        for text in texts
    ]
    assert told[0] == told[1]
    alone = evaluate(qwen2(len(tokenizer)), tokenizer, ROWS, device=CPU, limit=4, max_new_tokens=12, batch=3)
    assert told[0][0] == [answer.text for answer in alone.answers]
    right, steps = told[0][1]
    assert right == 1
    assert steps < 64


def test_a_score_without_answers_can_be_put_together():
    score = CallScore(asked=4, well_formed=4, right_function=2, right_arguments=1, unasked={})
    assert score.ratios() == {"well_formed": 1.0, "right_function": 0.5, "right_arguments": 0.25}
