"""Shrinkage, damping, the guard on held-out tokens, and folds."""

import pytest
import torch

from mxfp4.calibration import folding
from mxfp4.calibration.methods import METHODS, MethodOptions, round_stack
from mxfp4.calibration.moments import (
    Moments,
    conditional_energy,
    damped,
    damping,
    less_correlated,
    output_error,
    shrunk,
)
from mxfp4.calibration.rounding import round_even, search_scales
from mxfp4.errors import RecipeError


def observed(tokens, columns=64, stack=1, seed=0, weight=None):
    """Moments of random correlated tokens, and the tokens themselves [B, M, K]."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=torch.Generator().manual_seed(99))
    inputs = torch.randn(stack, tokens, columns, generator=generator) @ mix
    moments = Moments.empty(stack, columns)
    for entry in range(stack):
        for half in (0, 1):
            chosen = inputs[entry, half::2]
            moments.add(entry, chosen, half, None if weight is None else weight[half::2])
    return moments, inputs


def weights(rows=32, columns=64, stack=1):
    return torch.randn(stack, rows, columns, generator=torch.Generator().manual_seed(5))


def test_moments_are_the_weighted_mean_of_outer_products():
    weight = torch.rand(40)
    moments, inputs = observed(40, weight=weight)
    wanted = torch.einsum("m,mi,mj->ij", weight, inputs[0], inputs[0]) / weight.sum()
    torch.testing.assert_close(moments.mean()[0], wanted)
    assert moments.counts.tolist() == [40]
    half = moments.half(1).mean()[0]
    other = torch.einsum("m,mi,mj->ij", weight[1::2], inputs[0, 1::2], inputs[0, 1::2])
    torch.testing.assert_close(half, other / weight[1::2].sum())


def test_rescaled_moments_are_those_of_rescaled_inputs():
    moments, inputs = observed(30)
    scale = torch.rand(64) + 0.5
    again = Moments.empty(1, 64)
    again.add(0, inputs[0] / scale, 0)
    wanted = again.mean()
    # Products that cancel round against the size of the columns, not against their own.
    sizes = wanted.diagonal(dim1=1, dim2=2).sqrt()
    error = (moments.rescaled(scale).mean() - wanted).abs()
    assert (error <= 1e-6 * sizes.unsqueeze(1) * sizes.unsqueeze(2)).all()


def test_shrinking_counts_tokens_whatever_their_weight():
    heavy, _ = observed(100, seed=1)
    light, _ = observed(100, seed=1, weight=torch.full((100,), 0.01))
    prior, _ = observed(1000, seed=2)
    torch.testing.assert_close(
        shrunk(heavy, prior, torch.tensor([50.0])), shrunk(light, prior, torch.tensor([50.0]))
    )
    middle = (heavy.mean() * 100 + prior.mean() * 50) / 150
    torch.testing.assert_close(shrunk(heavy, prior, torch.tensor([50.0])), middle)
    nothing = Moments.empty(1, 64)
    torch.testing.assert_close(shrunk(nothing, prior, torch.tensor([50.0])), prior.mean())


def test_damping_grows_with_channels_per_token():
    counts = torch.tensor([0, 32, 1280, 10**6])
    found = damping(counts, 64, (0.01, 0.10), 0.2)
    assert found.tolist() == pytest.approx([0.1, 0.1, 0.01, 0.01])
    assert damping(torch.tensor([256]), 64, (0.01, 0.1), 0.2).item() == pytest.approx(0.05)


def test_doubt_takes_down_correlations_and_leaves_the_diagonal():
    hessian = observed(200)[0].mean()
    found = less_correlated(hessian, torch.tensor([0.25]))
    assert torch.equal(found.diagonal(dim1=1, dim2=2), hessian.diagonal(dim1=1, dim2=2))
    rest = ~torch.eye(64, dtype=torch.bool)
    assert torch.allclose(found[0][rest], 0.75 * hessian[0][rest])


def test_conditional_energy_is_what_regression_on_the_other_channels_leaves():
    hessian = observed(500)[0].mean()
    others = torch.arange(64) != 7
    across = hessian[0, 7, others].double()
    explained = across @ torch.linalg.solve(hessian[0][others][:, others].double(), across)
    left = float(hessian[0, 7, 7] - explained)
    assert conditional_energy(hessian)[0, 7].item() == pytest.approx(left, rel=1e-3)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_tokens_at_all_is_plain_rounding(method):
    result = round_stack(weights(), Moments.empty(1, 64), None, MethodOptions(method))
    if method in ("even", "gptq", "gptq+"):
        assert torch.equal(result.rounded.values(), round_even(weights()).values())
    assert torch.equal(damped(torch.zeros(1, 64, 64), torch.ones(1)), torch.eye(64)[None])


@pytest.mark.parametrize("method", ["gptq", "gptq+"])
@pytest.mark.parametrize("tokens", [2, 8, 32, 64, 128])
def test_few_tokens_are_never_worse_than_even_on_others(method, tokens):
    """The true inputs are known here: the error on them is what counts."""
    prior, _ = observed(64, seed=3)
    moments, _ = observed(tokens, stack=4, seed=4)
    truth = observed(20_000, seed=5)[0].mean().expand(4, -1, -1)
    weight = weights(stack=4)
    result = round_stack(weight, moments, prior, MethodOptions(method))
    assert result.guarded.all()
    error = output_error(weight, result.rounded.values(), truth)
    even = output_error(weight, round_even(weight).values(), truth)
    assert (error <= even * 1.001).all()


def test_the_guard_keeps_even_when_the_halves_contradict_each_other():
    """Tokens of one half see half of the channels, and those of the other the rest, negated."""
    moments = Moments.empty(1, 64)
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(24, 1, generator=generator)
    sign = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    noise = 0.02 * torch.randn(24, 64, generator=generator)
    moments.add(0, common + noise, 0)
    moments.add(0, common * sign + noise, 1)
    options = MethodOptions("gptq", damping_low=1e-4, damping_high=1e-4)
    result = round_stack(weights(rows=8), moments, None, options)
    assert result.kept_even.all()
    assert torch.equal(result.rounded.values(), round_even(weights(rows=8)).values())


def test_many_tokens_need_no_guard_and_win():
    moments, _ = observed(5000)
    result = round_stack(weights(), moments, None, MethodOptions("gptq"))
    assert not result.guarded.any()
    assert (result.error < 0.7 * result.even_error).all()


def test_search_is_chosen_by_the_size_of_inputs_only():
    moments, _ = observed(500)
    result = round_stack(weights(), moments, None, MethodOptions("search"))
    assert torch.equal(result.rounded.scales, search_scales(weights(), moments.importance()))


def test_an_unknown_method_names_the_known_ones():
    with pytest.raises(RecipeError, match=r"gptq\+"):
        MethodOptions("gptqq")


def test_a_stored_gain_and_its_scale_are_exact():
    generator = torch.Generator().manual_seed(0)
    gain = torch.randn(256, generator=generator).bfloat16().float()
    gain[3] = 0
    scale = torch.rand(256, generator=generator) * 4 + 0.1
    folded, used = folding.storable_gain(gain, scale, torch.bfloat16)
    assert torch.equal(folded.bfloat16().float(), folded)
    torch.testing.assert_close(folded * used, gain, rtol=1e-6, atol=0)
    assert (used / scale - 1).abs()[gain != 0].max() < 2**-7
    assert (folded[3], used[3]) == (0, 1)


def test_channel_scales_never_lose_to_no_folding():
    moments, _ = observed(300)
    moments = moments.rescaled(torch.logspace(-2, 2, 64))
    weight, hessian = weights(), moments.mean()
    for powers in (False, True):
        scale = folding.channel_scales(weight, hessian, powers_of_two=powers)
        if powers:
            assert torch.equal(scale, torch.exp2(scale.log2().round()))
        values = round_even(weight * scale.unsqueeze(1)).values() / scale.unsqueeze(1)
        plain = output_error(weight, round_even(weight).values(), hessian)
        assert output_error(weight, values, hessian) <= plain
        assert not torch.equal(scale, torch.ones_like(scale))


def test_rows_behind_the_channels_of_grouped_heads():
    rows = folding.rows_of_columns(row_count=4, column_count=8, head_size=2)
    # Query heads 0 and 1 read the first v head (rows 0, 1), heads 2 and 3 the second (rows 2, 3).
    assert rows.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert folding.rows_of_columns(6, 6, None).tolist() == list(range(6))
    mean = folding.shared_mean(torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]), rows, 4)
    assert mean.tolist() == [2, 3, 6, 7]


def test_shifted_rows_stay_within_the_bytes():
    scales = torch.tensor([[0, 5], [120, 130], [250, 252]], dtype=torch.uint8)
    wanted = torch.tensor([1.0, 2.0, -3.0])
    exponent = folding.limit_shift(scales, wanted)
    assert exponent.tolist() == [0, 2, 0]
    assert folding.shift_rows(scales, exponent).tolist() == [[0, 5], [118, 128], [250, 252]]
