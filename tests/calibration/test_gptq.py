"""GPTQ and coordinate descent against slow, plainly written versions."""

import numpy as np
import pytest
import torch

from mxfp4.calibration.descent import descend
from mxfp4.calibration.gptq import gptq, inverse_factor
from mxfp4.calibration.moments import damped, output_error
from mxfp4.calibration.rounding import round_even, round_with, search_scales
from mxfp4.spec import E2M1_VALUES


def problem(seed, rows=5, columns=96, tokens=300, stack=2):
    """Weights [B, N, K] and the second moments of correlated inputs [B, K, K]."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(stack, rows, columns, generator=generator)
    mix = torch.randn(stack, columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(stack, tokens, columns, generator=generator) @ mix
    inputs *= torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]
    hessian = inputs.transpose(1, 2) @ inputs / tokens
    return weight, damped(hessian, torch.full((stack,), 0.01))


def nearest(value, scale):
    """The nearest element times its scale; ties to the even code."""
    distance = [abs(abs(value) / scale - element) for element in E2M1_VALUES]
    least = min(distance)
    code = min((c for c, d in enumerate(distance) if d == least), key=lambda c: c % 2)
    return np.copysign(E2M1_VALUES[code] * scale, value)


def slow_gptq(weight, hessian, scales):
    """Optimal brain quantization of one row in a fixed order, with the inverse eliminated anew.

    After each column, the remaining weights minimise the quadratic exactly, by solving for them.
    """
    weight, hessian = weight.double().numpy(), hessian.double().numpy()
    order = np.argsort(-np.diag(hessian), kind="stable")
    result = np.zeros_like(weight)
    for row in range(weight.shape[0]):
        target, left = weight[row], weight[row].copy()
        done = []
        for position, column in enumerate(order):
            scale = 2.0 ** (int(scales[row, column // 32]) - 127)
            result[row, column] = nearest(left[column], scale)
            done.append(column)
            rest = order[position + 1 :]
            if len(rest):
                error = target[done] - result[row, done]
                left[rest] = target[rest] + np.linalg.solve(
                    hessian[np.ix_(rest, rest)], hessian[np.ix_(rest, done)] @ error
                )
    return result


@pytest.mark.parametrize("seed", range(3))
def test_gptq_is_optimal_brain_quantization_in_activation_order(seed):
    weight, hessian = problem(seed)
    scales = search_scales(weight, hessian.diagonal(dim1=-2, dim2=-1))
    found = gptq(weight, hessian, scales)
    assert torch.equal(found.scales, scales)
    for entry in range(weight.shape[0]):
        wanted = slow_gptq(weight[entry], hessian[entry], scales[entry])
        same = np.isclose(found.values()[entry].numpy(), wanted)
        # A rounding that falls on a midpoint in one precision changes all later columns of a row.
        assert same.all(1).mean() >= 0.6
        slow = torch.from_numpy(wanted).float()[None]
        error = output_error(weight[entry, None], slow, hessian[entry, None])
        mine = output_error(weight[entry, None], found.values()[entry, None], hessian[entry, None])
        assert mine.item() == pytest.approx(error.item(), rel=0.02)


def test_gptq_beats_rounding_under_correlated_inputs():
    weight, hessian = problem(7, rows=64)
    scales = search_scales(weight, hessian.diagonal(dim1=-2, dim2=-1))
    plain = output_error(weight, round_with(weight, scales).values(), hessian)
    error = output_error(weight, gptq(weight, hessian, scales).values(), hessian)
    assert (error < 0.6 * plain).all()


def test_gptq_with_a_diagonal_hessian_is_plain_rounding():
    weight, hessian = problem(3)
    diagonal = torch.diag_embed(hessian.diagonal(dim1=-2, dim2=-1))
    scales = round_even(weight).scales
    assert torch.equal(gptq(weight, diagonal, scales).values(), round_even(weight).values())


def test_gptq_of_a_stack_is_that_of_each_matrix():
    weight, hessian = problem(5, stack=3)
    scales = round_even(weight).scales
    together = gptq(weight, hessian, scales).values()
    for entry in range(3):
        one = slice(entry, entry + 1)
        alone = gptq(weight[one], hessian[one], scales[one]).values()
        torch.testing.assert_close(together[one], alone)


def test_inverse_factor():
    _, hessian = problem(2)
    factor = inverse_factor(hessian)
    assert torch.equal(factor, factor.triu())
    product = factor.transpose(1, 2) @ factor @ hessian
    torch.testing.assert_close(product, torch.eye(96).expand(2, -1, -1), atol=2e-2, rtol=0)


@pytest.mark.parametrize("move_exponents", [False, True])
def test_descent_lowers_the_error_and_stays_on_the_grid(move_exponents):
    weight, hessian = problem(11, rows=16)
    start = gptq(weight, hessian, round_even(weight).scales)
    found = descend(weight, start, hessian, sweeps=3, move_exponents=move_exponents)
    assert set(found.elements.abs().unique().tolist()) <= set(E2M1_VALUES)
    before = output_error(weight, start.values(), hessian)
    after = output_error(weight, found.values(), hessian)
    assert (after < before).all()
    assert torch.equal(found.scales, start.scales) != move_exponents


def test_descent_without_exponents_ends_where_no_single_move_helps():
    weight, hessian = problem(13, rows=2, columns=64, stack=1)
    found = descend(weight, round_even(weight), hessian, sweeps=60, move_exponents=False)
    values, scales = found.values()[0].double(), found.scales[0]
    metric, target = hessian[0].double(), weight[0].double()
    slope = (values - target) @ metric
    grid = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64)
    for column in range(64):
        step = 2.0 ** (scales[:, column // 32].double() - 127)
        for value in grid:
            move = value * step - values[:, column]
            change = move * (2 * slope[:, column] + move * metric[column, column])
            assert (change > -1e-5).all()
