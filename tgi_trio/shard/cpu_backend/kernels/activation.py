"""Activation functions of a vector."""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    divide,
    exp,
    fill,
    fma,
    load_float,
    maximum,
    minimum,
    multiply,
    subtract,
    where_at_least,
)
from tgi_trio.shard.cpu_backend.tables import Activation

SILU, GELU_TANH, GELU, QUICK_GELU, RELU2, XIELU, SIGMOID, SOFTPLUS = (
    int(activation)
    for activation in (
        Activation.SILU,
        Activation.GELU_TANH,
        Activation.GELU,
        Activation.QUICK_GELU,
        Activation.RELU2,
        Activation.XIELU,
        Activation.SIGMOID,
        Activation.SOFTPLUS,
    )
)


@kernel
def sigmoid_times(x, y):
    """Return x * sigmoid(y)."""
    return divide(x, add(fill(1.0), exp(subtract(fill(0.0), y))))


@kernel
def softplus(x):
    """Return log(1 + e^x), as max(x, 0) + log(1 + u) with u = e^-|x|.

    The logarithm is 2 artanh(u / (2 + u)), whose argument is at most 1/3: eight terms of the series
    have an error of 1e-9.
    """
    positive = maximum(x, fill(0.0))
    u = exp(subtract(x, add(positive, positive)))
    z = divide(u, add(fill(2.0), u))
    square = multiply(z, z)
    sum_ = fma(fill(1.0 / 15.0), square, fill(1.0 / 13.0))
    sum_ = fma(sum_, square, fill(1.0 / 11.0))
    sum_ = fma(sum_, square, fill(1.0 / 9.0))
    sum_ = fma(sum_, square, fill(1.0 / 7.0))
    sum_ = fma(sum_, square, fill(1.0 / 5.0))
    sum_ = fma(sum_, square, fill(1.0 / 3.0))
    sum_ = fma(sum_, square, fill(1.0))
    return fma(fill(2.0), multiply(z, sum_), positive)


@kernel
def gelu(x):
    """Return x * (1 + erf(x / sqrt 2)) / 2; erf by Abramowitz and Stegun 7.1.26, error 1.5e-7.

    x * erf(x / sqrt 2) is the same for x and -x, so only positive arguments are needed.
    """
    size = maximum(x, subtract(fill(0.0), x))
    z = multiply(size, fill(0.70710678))
    t = divide(fill(1.0), fma(fill(0.3275911), z, fill(1.0)))
    sum_ = fill(1.061405429)
    sum_ = fma(sum_, t, fill(-1.453152027))
    sum_ = fma(sum_, t, fill(1.421413741))
    sum_ = fma(sum_, t, fill(-0.284496736))
    sum_ = fma(sum_, t, fill(0.254829592))
    erf = subtract(fill(1.0), multiply(multiply(sum_, t), exp(subtract(fill(0.0), multiply(z, z)))))
    return multiply(fill(0.5), fma(size, erf, x))


@kernel
def xielu(x, learned):
    """Return xIELU (Huang 2024, arXiv 2411.13010) of x, with the parameters at `learned`."""
    grown = exp(minimum(x, fill(load_float(learned + 12))))
    below = subtract(subtract(grown, fill(1.0)), x)
    below = multiply(below, fill(load_float(learned + 4)))
    above = multiply(multiply(x, x), fill(load_float(learned)))
    return fma(x, fill(load_float(learned + 8)), where_at_least(0.0, x, above, below))


@kernel
def activate(kind, x, learned):
    """Return the activation function `kind` of x."""
    if kind == XIELU:
        return xielu(x, learned)
    if kind == SIGMOID:
        return sigmoid_times(fill(1.0), x)
    if kind == SOFTPLUS:
        return softplus(x)
    if kind == SILU:
        return sigmoid_times(x, x)
    if kind == GELU_TANH:  # (1 + tanh(u)) / 2 is sigmoid(2u)
        cubic = fma(multiply(multiply(x, x), x), fill(0.044715), x)
        return sigmoid_times(x, multiply(cubic, fill(2.0 * 0.7978845608)))
    if kind == QUICK_GELU:
        return sigmoid_times(x, multiply(x, fill(1.702)))
    if kind == GELU:
        return gelu(x)
    positive = maximum(x, fill(0.0))
    if kind == RELU2:
        return multiply(positive, positive)
    return positive


@kernel
def apply_soft_cap(x, cap):
    """Return cap * tanh(x / cap), or x where cap is 0. tanh(u) is 1 - 2 / (1 + e^2u)."""
    if cap == 0.0:
        return x
    grown = add(fill(1.0), exp(multiply(x, fill(2.0 / cap))))
    return multiply(fill(cap), subtract(fill(1.0), divide(fill(2.0), grown)))


@kernel
def cut(x, limit):
    """Clip x to [-limit, limit]; a limit of 0 means none."""
    if limit == 0.0:
        return x
    return minimum(maximum(x, fill(-limit)), fill(limit))
