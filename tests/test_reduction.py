import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import chunked_eqx as ceqx

from .helpers import assert_same


# For 13 rows, a prime.
SIZES = [
    pytest.param(c, marks=() if c in (1, 5) else pytest.mark.slow)
    for c in (None, 1, 3, 5, 12, 13, 20)
]
NAMES = ["sum", "mean", "min", "max", "prod"]
X = jr.normal(jr.key(0), (13, 3)) + 0.5


def _inputs():
    ties = jnp.round(X)  # Most extrema are attained more than once.
    return {
        "float": X,
        "ties": ties,
        "negative": -jnp.abs(X) - 1,
        "infinite": X.at[2, 0].set(jnp.inf).at[5, 1].set(-jnp.inf),
        "nan": X.at[7, 2].set(jnp.nan),
        "zeros": ties.at[:, 0].set(0.0),
        "bfloat16": X.astype(jnp.bfloat16),
        "int": jnp.arange(39).reshape(13, 3) - 20,
        "int8": (jnp.arange(39).reshape(13, 3) - 20).astype(jnp.int8),
        "uint8": jnp.arange(39).reshape(13, 3).astype(jnp.uint8),
        "bool": X > 0.5,
        "complex": X.astype(jnp.complex64) * (1 + 2j),
    }


INPUTS = _inputs()


@pytest.mark.parametrize("chunk_size", SIZES)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", NAMES)
def test_named_reductions(name, kind, chunk_size):
    x = INPUTS[kind]
    identity = ceqx.filter_vmap(lambda x: x, chunk_size=chunk_size, reduction=name)
    tol = 2e-2 if kind == "bfloat16" else 2e-5
    with np.errstate(all="ignore"):
        assert_same(identity(x), getattr(jnp, name)(x, axis=0), tol, tol)


@pytest.mark.parametrize("chunk_size", SIZES)
@pytest.mark.parametrize("kind", ["float", "ties", "zeros"])
@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name, kind, chunk_size):
    x = INPUTS[kind]
    weights = jnp.array([1.0, -2.0, 3.0])

    def chunked(x):
        f = ceqx.filter_vmap(lambda x: 2 * x, chunk_size=chunk_size, reduction=name)
        return f(x)

    def plain(x):
        return getattr(jnp, name)(2 * x, axis=0)

    assert_same(
        jax.grad(lambda x: weights @ chunked(x))(x),
        jax.grad(lambda x: weights @ plain(x))(x),
        atol=1e-4,
    )
    assert_same(jax.jvp(chunked, (x,), (x,)), jax.jvp(plain, (x,), (x,)), atol=1e-4)


@pytest.mark.parametrize("chunk_size", SIZES)
def test_of_a_batched_function(chunk_size):
    f = ceqx.filter_chunk(
        lambda x: (x.T, x),
        chunk_size=chunk_size,
        out_axes=(1, 0),
        reduction=("mean", None),
    )
    assert_same(f(X), (X.mean(0), X))


def test_narrow_sums_are_wide():
    ones = jnp.ones(4096, jnp.bfloat16)
    for name, expected in [("sum", 4096), ("mean", 1)]:
        f = ceqx.filter_vmap(lambda x: x, chunk_size=1, reduction=name)
        assert f(ones).dtype == jnp.bfloat16
        assert f(ones) == expected


@pytest.mark.parametrize("chunk_size", SIZES)
def test_user_reductions_see_subtrees_and_every_row_once(chunk_size):
    def moments(out):
        x, count = out["x"], jnp.asarray(out["x"].shape[0], jnp.float32)
        assert out["name"] == "static"
        return count, x.mean(0), jnp.sum((x - x.mean(0, keepdims=True)) ** 2, axis=0)

    def combine(a, b):
        (n, m, s), (k, o, t) = a, b
        delta = o - m
        total = n + k
        return total, m + delta * k / total, s + t + delta**2 * n * k / total

    welford = ceqx.Reduction(moments, combine, lambda v: (v[1], v[2] / v[0]))
    f = ceqx.filter_vmap(
        lambda x: ({"x": x, "name": "static"}, x[0]),
        chunk_size=chunk_size,
        reduction=(welford, None),
    )
    assert_same(f(X), ((X.mean(0), X.var(0)), X[:, 0]))
    grad = jax.grad(lambda x: f(x)[0][1].sum())(X)
    assert_same(grad, jax.grad(lambda x: x.var(0).sum())(X))


def test_per_example_gradients_are_never_all_in_memory():
    # The mean of clipped gradients of each row, as in differentially private training.
    mlp = eqx.nn.MLP(3, "scalar", 16, 1, key=jr.key(1))

    def clipped(x):
        grads = eqx.filter_grad(lambda m: m(x) ** 2)(mlp)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)

    got = ceqx.filter_vmap(clipped, chunk_size=4, reduction="mean")(X)
    rows = eqx.filter_vmap(clipped)(X)
    assert_same(got, jax.tree.map(lambda g: g.mean(0), rows))


def test_constant_outputs_count_once_for_each_row():
    f = ceqx.filter_vmap(lambda x: (x, 2.0, "s"), chunk_size=4, reduction="sum")
    total, constant, static = f(jnp.arange(13.0))
    assert (total, constant, static) == (78, 26, "s")


@pytest.mark.parametrize("name", NAMES)
def test_empty_batch(name):
    f = ceqx.filter_vmap(lambda x: x, chunk_size=4, reduction=name)
    if name in ("min", "max"):
        with pytest.raises(
            ValueError, match=f'`reduction="{name}"` of a batch without'
        ):
            f(X[:0])
    else:
        assert_same(f(X[:0]), getattr(jnp, name)(X[:0], axis=0))


@pytest.mark.parametrize("bad", ["average", 3, jnp.sum])
def test_bad_reduction(bad):
    with pytest.raises(ValueError, match="`reduction` must consist of None, 'sum'"):
        ceqx.filter_vmap(lambda x: x, chunk_size=2, reduction=bad)


def test_reduction_that_is_no_prefix():
    f = ceqx.filter_vmap(lambda x: (x, x), chunk_size=2, reduction=("sum",))
    with pytest.raises(ValueError, match="`reduction` must have the structure of a"):
        f(X)


def test_combine_that_changes_its_value():
    bad = ceqx.Reduction(lambda x: x.sum(), lambda a, b: a + b[None])
    f = ceqx.filter_vmap(lambda x: x, chunk_size=2, reduction=bad)
    with pytest.raises(ValueError, match="`Reduction.combine` must return a value of"):
        f(jnp.arange(8.0))
