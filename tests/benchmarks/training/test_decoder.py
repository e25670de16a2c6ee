"""The decoder is what its geometry says, and counts its own operations right."""

from __future__ import annotations

import pytest
import torch
from each import of_each
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from pytest_gpucluster.benchmarks.training import model as decoder
from pytest_gpucluster.benchmarks.training.fingerprint import fingerprint
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder

CPU = torch.device("cpu")
SIZES = {"layers": 2, "width": 64, "heads": 4, "vocab": 96, "sequence": 16}
GEOMETRY = Geometry(**SIZES)
SHARED = Geometry(**SIZES, key_heads=2, inner=80)
QWEN2_7B = Geometry(layers=28, width=3584, heads=28, key_heads=4, inner=18944, vocab=152064, sequence=4096)


def tokens(rows=2, length=GEOMETRY.sequence):
    return torch.randint(GEOMETRY.vocab, (rows, length), generator=torch.Generator().manual_seed(1))


@of_each("geometry", [GEOMETRY, Geometry(layers=3, width=192, heads=2, vocab=50, sequence=8), SHARED])
def test_the_geometry_counts_the_weights_that_there_are(geometry):
    model = make_decoder(geometry, CPU, seed=0)
    assert sum(weight.numel() for weight in model.parameters()) == geometry.parameters
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() > 1 and name != "embedding.weight"]
    assert sum(weight.numel() for weight in matrices) == geometry.multiplied_parameters
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()], "all that a checkpoint holds"


@of_each("geometry", [GEOMETRY, SHARED])
def test_operations_for_a_token_are_those_that_torch_counts_but_half_of_the_attention_s(geometry):
    model = make_decoder(geometry, CPU, seed=0)
    rows = tokens()
    # Decomposed into products, the attention is counted whole, masked half and all.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = model(rows)
        cross_entropy(logits.flatten(0, 1), rows.flatten()).backward()
    masked_half = 6 * geometry.layers * geometry.width * geometry.sequence
    assert counter.get_total_flops() == rows.numel() * (geometry.training_flops_per_token + masked_half)


def test_the_geometry_of_qwen2_7b_has_its_weights_and_operations():
    biases = QWEN2_7B.layers * (QWEN2_7B.width + 2 * QWEN2_7B.key_width)
    assert QWEN2_7B.parameters + biases == 7_615_616_512
    assert QWEN2_7B.training_flops_per_token == pytest.approx(44.89e9, rel=0.001)


def test_shared_keys_are_those_of_as_many_heads_that_are_alike():
    shared = make_decoder(SHARED, CPU, seed=0)
    whole = make_decoder(Geometry(**SIZES, inner=80), CPU, seed=0)
    wide, kept = SHARED.width, SHARED.key_width
    with torch.no_grad():
        for one, other in zip(whole.parameters(), shared.parameters(), strict=True):
            if one.shape == other.shape:
                one.copy_(other)
                continue
            query, *keys_and_values = other.split([wide, kept, kept])
            # Each head of keys, 16 wide, stands for two heads of queries.
            alike = [one.view(2, 1, 16, wide).expand(2, 2, 16, wide).reshape(wide, wide) for one in keys_and_values]
            one.copy_(torch.cat([query, *alike]))
        assert torch.allclose(shared(tokens()), whole(tokens()), atol=1e-6)


def test_recomputed_blocks_give_the_same_gradients_and_keep_less():
    def run(recompute):
        model, kept = make_decoder(GEOMETRY, CPU, seed=0), []
        if recompute:
            model.recompute()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: kept.append(saved.nbytes) or saved, lambda saved: saved
        ):
            loss = cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())
        loss.backward()
        return [weight.grad for weight in model.parameters()], sum(kept)

    (one, kept), (other, kept_less) = run(False), run(True)
    assert all(map(torch.equal, one, other))
    assert kept_less < kept / 2


def test_flash_attention_is_there_or_reported_why_not(monkeypatch):
    assert decoder.missing_flash_attention(CPU, SHARED) == ""

    def none(*arguments, **more):
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(decoder.functional, "scaled_dot_product_attention", none)
    assert decoder.missing_flash_attention(CPU, GEOMETRY) == "No available kernel. Aborting execution."


def test_a_seed_gives_the_same_weights_whatever_torch_s_own_generator_does():
    first = fingerprint(make_decoder(GEOMETRY, CPU, seed=7).parameters())
    torch.manual_seed(123)
    assert fingerprint(make_decoder(GEOMETRY, CPU, seed=7).parameters()) == first
    assert fingerprint(make_decoder(GEOMETRY, CPU, seed=8).parameters()) != first


def test_making_one_leaves_torch_s_own_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    make_decoder(GEOMETRY, CPU, seed=7)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_token_sees_what_comes_after_it():
    model, rows = make_decoder(GEOMETRY, CPU, seed=0), tokens()
    changed = rows.clone()
    changed[:, 9] = (changed[:, 9] + 1) % GEOMETRY.vocab
    with torch.no_grad():
        found, other = model(rows), model(changed)
    assert torch.equal(found[:, :9], other[:, :9])
    assert not torch.equal(found[:, 9], other[:, 9])
    assert not torch.equal(found[:, 10], other[:, 10]), "later tokens see it"


def test_norms_give_unit_variance_to_what_is_as_small_as_fresh_weights():
    model, small = make_decoder(GEOMETRY, CPU, seed=0), torch.full((1, GEOMETRY.width), decoder.INITIAL_DEVIATION)
    norms = [part for part in model.modules() if isinstance(part, torch.nn.RMSNorm)]
    assert len(norms) == 1 + 2 * GEOMETRY.layers
    for norm in norms:
        assert float(norm(small).detach().square().mean()) == pytest.approx(1.0, rel=0.05)


def test_positions_count_by_their_distance_only():
    cosine, sine = decoder._rotary(GEOMETRY)
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 1, 16, generator=random) for _ in range(2))

    def score(at, other):
        rotated = decoder._rotated(query, cosine[at : at + 1], sine[at : at + 1])
        return float((rotated * decoder._rotated(key, cosine[other : other + 1], sine[other : other + 1])).sum())

    assert score(2, 5) == pytest.approx(score(9, 12), rel=1e-4)
    assert score(2, 5) != pytest.approx(score(2, 6), rel=1e-2)


REFUSED = [({"heads": 3}, r"even multiple.* 64 is none of 3"), ({"key_heads": 3}, r"key_heads, and 4 is none of 3")]


@of_each("case", REFUSED)
def test_sizes_that_cannot_be_are_refused(case):
    sizes, message = case
    with pytest.raises(ValueError, match=message):
        Geometry(**SIZES | sizes)


@pytest.mark.parametrize(("width", "inner"), [(4096, 10944), (768, 2048), (64, 192)])
def test_the_mlp_is_eight_thirds_wide_up_to_the_next_multiple_of_64(width, inner):
    geometry = Geometry(layers=1, width=width, heads=1, vocab=64, sequence=16)
    assert geometry.mlp_width == inner
    assert decoder.ROTARY_BASE == 10_000.0  # Source: Su et al., "RoFormer" (arXiv:2104.09864), section 3.3
