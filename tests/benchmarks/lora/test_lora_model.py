"""The bases that LoRA is trained on: the same on every rank, and refused where they are not what they claim to be."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from each import of_each
from torch.utils.flop_counter import FlopCounterMode

from pytest_gpucluster.benchmarks.lora import model as lora_model
from pytest_gpucluster.benchmarks.lora.evaluation import reload_adapter
from pytest_gpucluster.benchmarks.lora.model import (
    QWEN2_7B,
    QWEN2_LABEL,
    TINY,
    Base,
    Geometry,
    MaskedLoss,
    TransformersLoss,
    given_base,
    make_adapted,
    make_base,
    random_base,
    tiny_base,
    trained_parameters,
)
from pytest_gpucluster.benchmarks.lora.throughput import random_blocks
from pytest_gpucluster.benchmarks.training.fingerprint import fingerprint
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

CPU = torch.device("cpu")
BASE = tiny_base(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model, as transformers saves one."""
    path = tmp_path_factory.mktemp("models") / "small-qwen2"
    make_base(BASE, CPU, precision="fp32", seed=3).save_pretrained(path)
    return path


def config_of(folder, tmp_path, **changes):
    fields = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def test_a_seed_gives_the_same_weights_again_the_base_in_bf16_and_what_learns_in_fp32():
    models = [make_adapted(BASE, CPU, precision="bf16", dropout=True, seed=seed) for seed in (0, 0, 1)]
    one, again, other = (fingerprint(model.parameters()) for model in models)
    assert one == again != other
    kinds = {(weight.requires_grad, weight.dtype) for weight in models[0].parameters()}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}


def test_the_loss_of_transformers_is_that_of_the_targets_in_the_mask():
    made = (make_adapted(BASE, CPU, precision="fp32", dropout=False, seed=0) for _ in range(2))
    ours, theirs = MaskedLoss(next(made)), TransformersLoss(next(made))
    tokens = torch.arange(2 * 33).view(2, 33) % 64
    mask = torch.zeros(2, 32, dtype=torch.bool)
    mask[0, 3:9] = mask[1, 20:31] = True  # not the last one, for which transformers has no label
    with torch.no_grad():
        expected = ours(tokens, mask)[0]
        torch.testing.assert_close(theirs(tokens, mask)[0], expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(theirs(tokens, mask)[1], expected, rtol=1e-5, atol=0)
        assert float(ours(tokens, mask)[1]) > 2 * float(expected)


def test_rotary_frequencies_have_their_values():
    rotary = make_base(BASE, CPU, precision="bf16", seed=0).model.rotary_emb
    half = BASE.geometry.width // BASE.geometry.heads // 2
    torch.testing.assert_close(rotary.inv_freq, 1e6 ** (-torch.arange(half) / half))


def test_a_given_model_keeps_its_own_name_and_its_weights(folder):
    base = given_base(str(folder), path=folder)
    assert (base.label, base.geometry) == ("small-qwen2", BASE.geometry)
    assert base.adapters.rank == 64
    loaded, made = (make_base(one, CPU, precision="fp32", seed=3) for one in (base, BASE))
    assert fingerprint(loaded.parameters()) == fingerprint(made.parameters())
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, made.model.rotary_emb.inv_freq)


def test_a_model_of_the_hub_has_the_name_and_the_revision_that_were_asked_for(folder, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, *, revision, **more: str(folder))
    base = given_base("Some/Small-Qwen2", revision="0123abc")
    assert (base.label, base.folder, base.origin) == ("Small-Qwen2", folder, "Some/Small-Qwen2@0123abc")


def test_only_qwen2_7b_s_sizes_are_called_so(tmp_path):
    fields = QWEN2_7B.config_fields() | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert given_base("x", path=tmp_path).label == QWEN2_LABEL
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 27}))
    assert given_base("x", path=tmp_path).label == tmp_path.name


def test_another_kind_of_model_and_no_model_are_refused(folder, tmp_path):
    with pytest.raises(EnvironmentBroken, match=r"no model"):
        given_base("x", path=tmp_path)
    with pytest.raises(EnvironmentBroken, match=r"type qwen2 .* llama"):
        given_base("x", path=config_of(folder, tmp_path, model_type="llama"))
    with pytest.raises(EnvironmentBroken, match="sliding window"):
        given_base("x", path=config_of(folder, tmp_path, use_sliding_window=True, sliding_window=16))


def test_sizes_that_contradict_themselves_or_the_weights_are_reported(folder, tmp_path):
    with pytest.raises(EnvironmentBroken, match=r"config.json .*key_heads"):
        given_base("x", path=config_of(folder, tmp_path, num_key_value_heads=3))
    with pytest.raises(EnvironmentBroken, match=r"config.json contradicts itself"):
        given_base("x", path=config_of(folder, tmp_path, num_attention_heads=0))
    other = given_base("x", path=config_of(folder, tmp_path, intermediate_size=256))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(EnvironmentBroken, match=r"weights cannot"):
        make_base(other, CPU, precision="fp32", seed=0)


def test_weights_that_are_missing_or_cut_off_are_reported(folder, tmp_path):
    base = given_base("x", path=config_of(folder, tmp_path))
    with pytest.raises(EnvironmentBroken, match=r"weights cannot"):
        make_base(base, CPU, precision="fp32", seed=0)
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EnvironmentBroken, match=r"weights cannot.*: "):
        make_base(base, CPU, precision="fp32", seed=0)


def test_adapters_that_are_cut_off_are_reported(tmp_path):
    model = make_adapted(BASE, CPU, precision="fp32", dropout=True, seed=0)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WrongResult, match=r"adapters "):
        reload_adapter(BASE, tmp_path, CPU, precision="fp32", seed=0)


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub import constants

    asked = []

    def silent(self, name, **given):
        asked.append((name, given["revision"], given["timeout"]))
        raise TimeoutError("timed out")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", silent)
    with pytest.raises(EnvironmentBroken, match=r"Qwen/Qwen2-7B@0123abc: .*hub does"):
        given_base("Qwen/Qwen2-7B", revision="0123abc")
    assert asked == [("Qwen/Qwen2-7B", "0123abc", 10.0)]


def test_offline_a_model_that_is_not_cached_fails_at_once_and_says_why(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EnvironmentBroken, match=r"Qwen/Qwen2-7B@0123abc: .*HF_HUB_OFFLINE"):
        given_base("Qwen/Qwen2-7B", revision="0123abc")
    with pytest.raises(EnvironmentBroken, match="Qwen/Qwen2-7B names no revision"):
        given_base("Qwen/Qwen2-7B")


def test_a_model_that_has_other_weights_than_its_sizes_or_its_name_say_is_wrong(monkeypatch):
    made = lora_model.make_base
    monkeypatch.setattr(lora_model, "make_base", lambda base, *given, **more: made(tiny_base(301), *given, **more))
    with pytest.raises(WrongResult, match=r"lora_tiny: .* [\d,]+ parameters, expected [\d,]+"):
        make_adapted(BASE, CPU, precision="fp32", dropout=True, seed=0)


def test_losses_are_those_of_the_mask_and_of_all_and_the_same_where_logits_are_computed_in_parts(monkeypatch):
    model = MaskedLoss(make_adapted(BASE, CPU, precision="fp32", dropout=False, seed=0))
    assert model.adapted.peft_config["default"].lora_dropout == 0.0
    packed = random_blocks(4, 16, BASE.geometry.vocab, seed=1)
    packed.loss_mask[:, 1::2] = False
    whole = model(packed.tokens, packed.loss_mask)
    logits = model.causal(input_ids=packed.tokens[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), packed.tokens[:, 1:], reduction="none")
    torch.testing.assert_close(whole, (losses[packed.loss_mask].sum(), losses.sum()))
    monkeypatch.setattr(lora_model, "LOGITS_AT_ONCE", BASE.geometry.vocab * 10)
    parts = model(packed.tokens, packed.loss_mask)
    torch.testing.assert_close(parts, whole)
    parts[0].backward()


# ---- sizes and operations, against the real model and what torch counts


def test_the_formulas_give_qwen2_7b_to_the_last_parameter():
    assert QWEN2_7B.parameters == 7_615_616_512
    assert QWEN2_7B.adapter_parameters(64) == 161_480_704
    assert QWEN2_7B.flops_per_token(4096, rank=64) / 1e9 == pytest.approx(31.72, abs=0.005)


def test_the_real_model_on_meta_has_exactly_these_parameters():
    model = make_adapted(random_base(), torch.device("meta"), precision="bf16", dropout=True, seed=0)
    base = sum(weight.numel() for name, weight in model.named_parameters() if ".lora_" not in name)
    assert (base, trained_parameters(model)) == (7_615_616_512, 161_480_704)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (64, 128, 0.05)
    assert len(config.target_modules) == 7
    trained = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    assert trained == {torch.float32}


def test_torch_counts_the_same_operations():
    geometry = Geometry(width=64, inner=160, layers=2, heads=4, key_heads=2, vocab=96, sequence=64)
    base = Base(label="small", geometry=geometry, adapters=TINY)
    model = MaskedLoss(make_adapted(base, CPU, precision="fp32", dropout=False, seed=0))
    # What it counts of fused attention depends on the kernel, and plain products say all.
    model.causal.set_attn_implementation("eager")
    tokens = torch.zeros(1, 33, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.ones(1, 32, dtype=torch.bool))[0].backward()
    expected = 32 * geometry.flops_per_token(32, rank=TINY.rank, head_trained=True)
    masked = 32 * 6 * geometry.layers * geometry.width * 32
    assert counter.get_total_flops() == pytest.approx(expected + masked, rel=1e-3)


@of_each("vocab", [512, 300])
def test_a_tiny_model_has_as_many_parameters_as_the_formula_says(vocab):
    base = tiny_base(vocab)
    geometry = base.geometry
    model = make_adapted(base, CPU, precision="bf16", dropout=True, seed=0)
    frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    assert frozen == geometry.parameters
    assert trained_parameters(model) == geometry.adapter_parameters(16) + 2 * geometry.vocab * geometry.width


def test_sizes_that_do_not_fit_are_refused():
    for wrong in ({"heads": 27}, {"key_heads": 3}, {"width": 28 * 127}):
        with pytest.raises(ValueError, match=r"must be"):
            replace(QWEN2_7B, **wrong)


def test_every_field_of_the_configuration_is_given():
    from transformers import Qwen2Config

    config = Qwen2Config(**QWEN2_7B.config_fields())
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (3584, 28, 152064)
    assert config.rope_parameters["rope_theta"] == 1e6
    assert set(config.layer_types) == {"full_attention"}
    assert not config.tie_word_embeddings
    assert (config.max_position_embeddings, config.attention_dropout) == (131072, 0.0)


def test_the_sizes_of_the_rehearsal_s_model_are_these():
    sizes = {"width": 128, "inner": 384, "layers": 2, "heads": 4, "key_heads": 2, "sequence": 4096}
    assert tiny_base(64).geometry == Geometry(vocab=64, **sizes)
    assert (QWEN2_7B.rms_epsilon, QWEN2_7B.rope_base) == (1e-6, 1e6)  # Source: config.json of Qwen/Qwen2-7B
