"""The LoRA trainer: on one rank what a step is, and on several that they take the same steps as one."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from each import of_each
from forked_ranks import on_ranks
from torch.distributed.fsdp import FSDPModule

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.lora import convergence
from pytest_gpucluster.benchmarks.lora import trainer as lora_loop
from pytest_gpucluster.benchmarks.lora.model import MaskedLoss, make_adapted, random_base, tiny_base
from pytest_gpucluster.benchmarks.lora.packing import global_batch
from pytest_gpucluster.benchmarks.lora.throughput import lora_throughput, random_blocks
from pytest_gpucluster.benchmarks.lora.trainer import COMPONENTS, Trainer
from pytest_gpucluster.benchmarks.lora.training_plan import Plan, Recipe
from pytest_gpucluster.benchmarks.training import throughput_setup
from pytest_gpucluster.benchmarks.training.sharding import local
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.device.products import deterministic
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.sampling import Sampling

CPU = torch.device("cpu")
BASE = tiny_base(64)
RECIPE = Recipe(steps=4, warmup_steps=1, global_batch=4, micro_batch=4, learning_rate=5e-3, precision="fp32")


def blocks(count=8, sequence=16):
    packed = random_blocks(count, sequence, 64, seed=1)
    packed.loss_mask[:, 1::2] = False
    packed.loss_mask[1] = False
    packed.loss_mask[1, 3] = True
    return packed


@pytest.fixture
def make(group):
    """Makes loops over a group of this process alone."""

    def trainer(packed=None, *, components=None, base=BASE, **changes):
        return Trainer(group, CPU, base, replace(RECIPE, **changes), packed or blocks(), components=components)

    return trainer


def steps(trainer, count=3):
    return [trainer.step(number) for number in range(1, count + 1)]


def test_the_loss_is_the_mean_over_the_judged_targets_alone(make):
    packed = blocks(count=4)
    [step] = steps(make(packed, dropout=False), 1)
    model = make_adapted(BASE, CPU, precision="fp32", dropout=False, seed=0).eval()
    logits = model(input_ids=packed.tokens[:, :-1]).logits.detach()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), packed.tokens[:, 1:].flatten(), reduction="none")
    assert step.loss == pytest.approx(float(losses[packed.loss_mask.flatten()].mean()), rel=1e-5)
    assert step.all_token_loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert step.all_finite


def test_padding_counts_neither_in_the_loss_nor_as_tokens(make):
    packed = blocks(count=4)
    packed.loss_mask[:] = torch.arange(16) < torch.tensor([[3], [8], [16], [11]])
    padded = replace(packed, padded=True)
    [step] = steps(make(padded, dropout=False, micro_batch=2), 1)
    spoiled = replace(padded, tokens=torch.cat([packed.tokens[:, :1], packed.tokens[:, 1:] * packed.loss_mask], dim=1))
    [same] = steps(make(spoiled, dropout=False, micro_batch=4), 1)
    assert step.tokens == same.tokens == 38
    assert step.loss == step.all_token_loss == pytest.approx(same.loss, rel=1e-6)
    assert step.gradient_norm == pytest.approx(same.gradient_norm, rel=1e-4)


def test_weight_decay_is_that_of_the_recipe(make):
    def weights(decay):
        trainer = make(weight_decay=decay, components=replace(COMPONENTS, loss=lambda summed, targets: 0 * summed))
        trainer.step(1)
        return [local(weight.detach()) for weight in trainer.model.parameters() if weight.requires_grad]

    for kept, decayed in zip(weights(0.0), weights(0.5), strict=True):
        torch.testing.assert_close(decayed, kept * (1 - 5e-3 * 0.5))


def train_on_rank(rank):
    packed, others = blocks(), blocks(count=5)  # rank 1 has fewer loss_mask targets, and a held-out block less
    micro_batch = 4 if dist.get_world_size() == 1 else 1  # they add up to the same step; of 3 ranks one has two blocks
    trainer = Trainer(dist.group.WORLD, CPU, BASE, replace(RECIPE, dropout=False, micro_batch=micro_batch), packed)
    taken = steps(trainer)
    return taken, trainer.held_out_loss(others), trainer.moved_adapters(), trainer.unchanged_base()


@pytest.fixture(scope="module")
def of_one_rank():
    [found] = on_ranks(1, train_on_rank)
    return found


@of_each("ranks", [2, 3, 4])
def test_ranks_take_the_steps_of_one_and_report_the_mean_of_all(of_one_rank, ranks):
    alone, held_out, _, _ = of_one_rank
    trained = on_ranks(ranks, train_on_rank)
    assert sum(taken[0].tokens for taken, *_ in trained) == alone[0].tokens
    for taken, loss, moved, unchanged in trained:
        assert (moved, unchanged) == (1.0, 1.0)
        assert loss == pytest.approx(held_out, rel=1e-4)
        for found, expected in zip(taken, alone, strict=True):
            assert found.loss == pytest.approx(expected.loss, rel=1e-4)
            assert found.all_token_loss == pytest.approx(expected.all_token_loss, rel=1e-4)
            assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-3)


def spoil_on_rank_1(rank, kind):
    """In the second step."""
    number = 0

    def shard(model, mesh, **how):
        lora_loop.shard(model, mesh, **how)
        if rank == 1 and kind == "loss":
            model.register_forward_hook(lambda module, given, sums: (sums[0] * spoil(), sums[1]))

    def spoil():
        return math.nan if rank == 1 and number == 2 else 1.0

    def loss(summed, targets):
        return lora_loop.token_mean(summed, targets) * (spoil() if kind == "gradient" else 1.0)

    def update(model, optimizer):
        optimizer.step()
        weight = next(its for its in model.parameters() if its.requires_grad)
        weight.to_local().detach().mul_(spoil() if kind == "update" else 1.0)

    components = replace(COMPONENTS, shard=shard, loss=loss, update=update)
    trainer = Trainer(dist.group.WORLD, CPU, BASE, RECIPE, blocks(), components=components)
    found = []
    for number in (1, 2):
        step = trainer.step(number)
        found.append((step.finite, step.all_finite))
    return found


@of_each("kind", ["loss", "gradient", "update"])
def test_the_rank_whose_loss_gradient_or_weights_are_not_finite_is_known_to_all(kind):
    assert on_ranks(2, spoil_on_rank_1, kind) == [[(True, True), (own, False)] for own in (True, False)]


@of_each("precision", ["fp32", "bf16"])
def test_recomputing_activations_changes_nothing(make, precision):
    without, with_it = (make(precision=precision, recompute=how) for how in ("off", "on"))
    kept, recomputed = steps(without), steps(with_it)
    assert (without.notes, with_it.notes) == ([], ["activations are recomputed: set in the workload"])
    assert [step.loss for step in kept] == [step.loss for step in recomputed]
    assert [step.weights for step in kept] == [step.weights for step in recomputed]


def test_adapters_learn_under_a_frozen_embedding_where_activations_are_recomputed(make):
    trainer = make(base=replace(BASE, adapters=replace(BASE.adapters, saved=())), recompute="on")
    assert steps(trainer, 1)[0].all_finite
    assert (trainer.moved_adapters(), trainer.unchanged_base()) == (1.0, 1.0)


def test_each_block_is_sharded_for_itself_where_that_has_a_use(make):
    for precision, expected in (("bf16", 1 + BASE.geometry.layers), ("fp32", 0)):
        parts = make(precision=precision).model.modules()
        assert sum(isinstance(part, FSDPModule) for part in parts) == expected


def test_steps_are_taken_to_the_last_or_up_to_one_whose_loss_is_not_finite(make):
    seen = []
    assert len(make().steps(3, on_step=seen.append)) == len(seen) == 3
    trainer, seen = make(), []
    taken = []
    with patch.object(trainer, "step", lambda number: replace(make().step(1), all_finite=number < 2)):
        taken = trainer.steps(4, first=1, on_step=seen.append)
    assert (len(taken), len(seen)) == (2, 1)


def test_the_same_seed_gives_the_same_weights_after_each_step_and_another_one_others(make):
    one, again = (steps(make()) for _ in range(2))
    assert [step.weights for step in one] == [step.weights for step in again]
    other = steps(make(seed=1))
    assert not {step.weights for step in one} & {step.weights for step in other}


def test_each_step_learns_at_the_rate_of_the_plan(make):
    plan = replace(COMPONENTS, learning_rate=lambda number, recipe: 1e-3 if number == 2 else 0.0)
    first, second, third = (step.weights for step in steps(make(components=plan)))
    assert first != second == third


def test_a_frozen_weight_that_changes_and_adapters_that_do_not_are_seen(make):
    trainer = make()
    frozen = [weight for weight in trainer.model.parameters() if not weight.requires_grad]
    assert (trainer.moved_adapters(), trainer.unchanged_base()) == (0.0, 1.0)
    for changed, weight in enumerate(frozen[:6], start=1):
        local(weight).detach().view(torch.int32).flatten()[0] ^= 1
        assert trainer.unchanged_base() == pytest.approx((len(frozen) - changed) / len(frozen))


def test_held_out_blocks_are_taken_whole_and_leave_the_model_as_it_was(make):
    of_step, same = blocks(count=4), make(blocks(count=4), dropout=False)
    assert same.held_out_loss(of_step) == pytest.approx(make(of_step, dropout=False).step(1).loss, rel=1e-5)
    trainer, packed = make(dropout=False), blocks(count=5)
    loss = trainer.held_out_loss(packed)
    assert math.isfinite(loss)
    assert trainer.held_out_loss(packed) == loss
    assert steps(trainer, 1)[0].weights == steps(make(dropout=False), 1)[0].weights


def test_without_a_compiler_blocks_run_eagerly_and_it_is_said(make, monkeypatch):
    monkeypatch.setattr(throughput_setup, "missing_compiler", lambda device: "no C compiler")
    trainer = make(compiled=True)
    assert trainer.not_compiled == "no C compiler"
    assert trainer.notes[0].endswith(": no C compiler")
    assert steps(trainer, 1)[0].all_finite


def compare(*, steps=2, precision="fp32", base=BASE, alone=None):
    """The comparison of some steps on this group; what is planted in the trainer is not in what one rank computes."""
    recipe = RECIPE.compared(steps=steps, global_batch=5, precision=precision)
    with deterministic():
        return convergence.check_parity(dist.group.WORLD, alone or dist.group.WORLD, CPU, base, recipe, blocks())


def test_a_reference_that_is_not_finite_is_no_agreement(make, monkeypatch):
    reference = {"loss": lambda summed, targets: summed * math.nan}
    monkeypatch.setattr(convergence, "Components", lambda **more: replace(COMPONENTS, **reference, **more))
    found, moved = compare()
    assert (found.finite, moved) == ([True, True], 1.0)
    assert math.isnan(found.gradient)


def shifted(self, hidden, targets, counts):
    return MaskedLoss._sums(self, hidden, targets.roll(-1), counts)


def test_labels_that_are_shifted_on_all_ranks_are_no_agreement_with_transformers(make, monkeypatch):
    right, _ = compare()
    model = type("Shifted", (MaskedLoss,), {"_sums": shifted})
    monkeypatch.setattr(lora_loop, "COMPONENTS", replace(COMPONENTS, model=model))
    found, _ = compare()
    assert right.loss < 1e-6 < 1e-3 < found.loss
    assert right.gradient < 1e-5 < 0.1 < found.gradient


def test_adapters_that_are_frozen_do_not_move_and_are_no_accident(make, monkeypatch):
    """Also where nothing else is trained."""
    base = replace(BASE, adapters=replace(BASE.adapters, saved=()))

    def frozen(*given, **more):
        model = make_adapted(*given, **more)
        return model.requires_grad_(False)

    monkeypatch.setattr(lora_loop, "COMPONENTS", replace(COMPONENTS, make=frozen))
    found, moved = compare(base=base)
    assert (moved, found.gradient) == (0.0, 1.0)


@of_each("case", [("fp32", 3), ("bf16", 2)])
def test_steps_of_any_number_of_ranks_are_those_of_one_and_move_the_loss(case):
    precision, ranks = case
    for found, moved in on_ranks(ranks, compare_on_rank, precision):
        assert (moved, found.finite) == (1.0, [True] * 4)
        assert found.loss < 1e-6
        assert found.gradient < (1e-5 if precision == "fp32" else 1e-3)
        assert found.weight == 0


def compare_on_rank(rank, precision):
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    return compare(steps=4, precision=precision, alone=groups[rank])


def weigh_ranks_alike(rank, precision):
    """As the mean of the ranks' own means: of 5 blocks the last rank has one, and the others two."""
    weight = 5 / 3 / (1 if rank == 2 else 2)
    loss = lora_loop.token_mean
    lora_loop.COMPONENTS = replace(COMPONENTS, loss=lambda summed, targets: weight * loss(summed, targets))
    return compare_on_rank(rank, precision)


def test_ranks_with_fewer_tokens_that_count_as_much_as_the_others_are_no_agreement():
    assert [found.gradient > 0.1 for found, _ in on_ranks(3, weigh_ranks_alike, "fp32")] == [True] * 3


def test_running_out_of_memory_is_reported_with_its_figures(make):
    def loss(summed, targets):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 79 GiB")

    trainer = make(components=replace(COMPONENTS, loss=loss))
    with pytest.raises(EnvironmentBroken, match=r"of memory.* 1 of lora_tiny: .*4 blocks of 16 .*estimated") as raised:
        trainer.step(1)
    assert raised.value.__suppress_context__


def test_too_little_memory_is_reported_with_its_figures_before_anything_is_made(make, monkeypatch):
    monkeypatch.setattr(Cpu, "free_bytes", lambda device: 10**6)
    with pytest.raises(EnvironmentBroken, match=r"needs about .* GB of memory.* .* has 0.001 GB free"):
        make()


@of_each("case", [(120, False, False), (60, True, False), (20, True, True)])
def test_activations_of_qwen2_7b_are_recomputed_where_the_memory_demands_it(make, monkeypatch, case):
    free_gb, recompute, lacking = case
    monkeypatch.setattr(Cpu, "free_bytes", lambda device: free_gb * 10**9)
    recipe = replace(RECIPE, global_batch=2, micro_batch=2, precision="bf16")
    plan = Plan(base=random_base(), recipe=recipe, sequence=4096, ranks=1)
    found = plan.choose_recompute(Ranks(dist.group.WORLD, CPU), CPU)
    assert (found[0], bool(found[1])) == (recompute, lacking)


def throughput(components=COMPONENTS, **more):
    sampling = Sampling(warmup_seconds=0.0, window_seconds=0.01, longest_seconds=0.1, tolerance_ratio=3.0)
    recipe = replace(RECIPE, steps=1000, recompute="auto")
    with patch.object(lora_loop, "COMPONENTS", components):
        return lora_throughput(dist.group.WORLD, CPU, base=BASE, recipe=recipe, sequence=16, sampling=sampling, **more)


def test_the_throughput_of_any_sizes_can_be_measured(make):
    seen = []
    found = throughput(progress=lambda step, of, **figures: seen.append((step, of)))
    assert found.tokens_per_second.median > 0
    assert len(found.tokens_per_second.samples) == seen[-1][0] - 3 >= 8
    assert max(of for _, of in seen) < 1000, "the steps to come, and not those that there may be at most"
    assert (seen[0][0], seen[-1][0]) == (3, seen[-1][1])
    assert found.peak_bytes is None


def test_throughput_of_losses_that_are_not_finite_is_no_throughput(make):
    with pytest.raises(WrongResult, match="step 1: the loss is"):
        throughput(components=replace(COMPONENTS, loss=lambda summed, targets: summed * math.nan))


def test_the_first_step_trains_on_the_first_global_batch(make):
    packed = blocks()
    trainer = make(packed, dropout=False)
    assert trainer.tokens_of_rank == 4 * 16
    first = global_batch(0, size=4, blocks=8, seed=RECIPE.seed)
    model = make_adapted(BASE, CPU, precision="fp32", dropout=False, seed=0).eval()
    tokens, loss_mask = packed.tokens[list(first)], packed.loss_mask[list(first)]
    logits = model(input_ids=tokens[:, :-1]).logits.detach()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    assert trainer.step(1).loss == pytest.approx(float(losses[loss_mask.flatten()].mean()), rel=1e-5)
