"""The tiny tokenizer is the same wherever it is trained; those of models are loaded from folders."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_gpucluster.benchmarks.lora.hub import ANSWER_SECONDS
from pytest_gpucluster.benchmarks.lora.rendering import text_of
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.benchmarks.lora.tokenizer import fingerprint, tiny_tokenizer, tokenizer_for
from pytest_gpucluster.errors import EnvironmentBroken

pytest.importorskip("transformers")
ROWS = synthetic_rows(200, seed=0)


@pytest.fixture(scope="module")
def tiny():
    return tiny_tokenizer(ROWS)


def test_it_has_as_many_tokens_as_asked_for_an_end_and_a_padding(tiny):
    assert len(tiny) == tiny.vocab_size == 512
    assert (tiny.eos_token, tiny.eos_token_id, tiny.pad_token, tiny.pad_token_id) == ("<|endoftext|>", 0, "<|pad|>", 1)


def test_any_text_is_the_same_after_encoding_and_decoding(tiny):
    for text in [text_of(ROWS[0]), "Größe 東京 \U0001f600 \x00\t\n  x", "", "  two  spaces ,and a comma ."]:
        assert tiny.decode(tiny(text)["input_ids"]) == text


def test_another_process_trains_the_same_one_with_any_number_of_threads(tiny):
    code = (
        "from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows\n"
        "from pytest_gpucluster.benchmarks.lora.tokenizer import fingerprint, tiny_tokenizer\n"
        "print(fingerprint(tiny_tokenizer(synthetic_rows(200, seed=0))))"
    )
    environment = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300, env=environment
    )
    assert found.stdout.strip() == fingerprint(tiny)


def test_other_rows_give_another_one(tiny):
    assert fingerprint(tiny_tokenizer(ROWS[:150])) != fingerprint(tiny)


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="tokens, and 5000 are asked for: give more rows"):
        tiny_tokenizer(ROWS[:2], vocab=5000)


def test_the_tokenizer_of_a_folder_is_the_one_that_was_saved(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    loaded = tokenizer_for(tmp_path)
    assert loaded.eos_token_id == tiny.eos_token_id
    assert loaded(text_of(ROWS[3]))["input_ids"] == tiny(text_of(ROWS[3]))["input_ids"]


@pytest.mark.parametrize("name", ["folder", "me/nothing"])
def test_a_model_without_a_tokenizer_is_an_error(tmp_path, monkeypatch, name):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(EnvironmentBroken, match=f"^{name}: no tokenizer can be loaded from it"):
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
    with pytest.raises(EnvironmentBroken, match=r"^me/nothing: no tokenizer can be loaded from it"):
        tokenizer_for("me/nothing")
    assert asked == [ANSWER_SECONDS]


def test_a_tokenizer_without_an_end_is_an_error(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"eos_token"', '"an_eos_token"'))
    with pytest.raises(EnvironmentBroken, match="its tokenizer has no end token"):
        tokenizer_for(tmp_path)


@pytest.mark.parametrize("call", [lambda: tiny_tokenizer(ROWS), lambda: tokenizer_for("x")], ids=["tiny", "model"])
def test_without_transformers_the_line_to_install_it_is_told(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EnvironmentBroken, match=r"transformers is not installed; install it with python -m pip"):
        call()
