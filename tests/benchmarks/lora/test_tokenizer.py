"""The tiny tokenizer is the same wherever it is trained; those of models are loaded from folders."""

from __future__ import annotations

import os
import sys

import pytest
from forked_ranks import on_ranks
from programs import needs_modules

from pytest_gpucluster.benchmarks.lora.hub import ANSWER_SECONDS
from pytest_gpucluster.benchmarks.lora.packing import text_of, tiny_tokenizer, tokenizer_fingerprint, tokenizer_for
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.errors import EnvironmentBroken

pytestmark = needs_modules("transformers")
ROWS = synthetic_rows(200, seed=0)


@pytest.fixture(scope="module")
def tiny():
    return tiny_tokenizer(ROWS)


def test_it_has_as_many_tokens_as_asked_for_an_end_and_a_padding_and_keeps_any_text(tiny):
    assert len(tiny) == tiny.vocab_size == 512
    assert (tiny.eos_token, tiny.eos_token_id, tiny.pad_token, tiny.pad_token_id) == ("<|endoftext|>", 0, "<|pad|>", 1)
    for text in [text_of(ROWS[0]), "Größe 東京 \U0001f600 \x00\t\n  x", "", "  two  spaces ,and a comma ."]:
        assert tiny.decode(tiny(text)["input_ids"]) == text


def trained_on_one_thread(rank):
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    return tokenizer_fingerprint(tiny_tokenizer(synthetic_rows(200, seed=0)))


def test_another_process_trains_the_same_one_with_any_number_of_threads_and_other_rows_give_another(tiny):
    assert on_ranks(1, trained_on_one_thread) == [tokenizer_fingerprint(tiny)]
    assert tokenizer_fingerprint(tiny_tokenizer(ROWS[:150])) != tokenizer_fingerprint(tiny)
    with pytest.raises(ValueError, match=r"tokens, and 5000"):
        tiny_tokenizer(ROWS[:2], vocab=5000)


def test_the_tokenizer_of_a_folder_is_the_one_that_was_saved_and_it_must_have_an_end(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    loaded = tokenizer_for(tmp_path)
    assert loaded.eos_token_id == tiny.eos_token_id
    assert loaded(text_of(ROWS[3]))["input_ids"] == tiny(text_of(ROWS[3]))["input_ids"]
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


def test_without_transformers_the_line_to_install_it_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (lambda: tiny_tokenizer(ROWS), lambda: tokenizer_for("x")):
        with pytest.raises(EnvironmentBroken, match=r"installed; install.* -m pip"):
            call()
