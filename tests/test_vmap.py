import functools as ft
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from hypothesis import given, settings, strategies as st

import chunked_eqx as ceqx

from .helpers import assert_same


X = jr.normal(jr.key(0), (14, 3))


def test_decorators():
    @ceqx.filter_vmap
    def plain(x):
        """Double."""
        return 2 * x

    @ceqx.filter_vmap(chunk_size=5)
    def chunked(x):
        return 2 * x

    @ceqx.filter_chunk(num_chunks=3)
    def batched(x):
        return 2 * x

    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Double."
    for f in (plain, chunked, batched):
        assert_same(f(X), 2 * X)


def test_methods():
    class Model(eqx.Module):
        weight: jax.Array

        @ceqx.filter_vmap(chunk_size=5, in_axes=(None, 0))
        def __call__(self, x):
            return self.weight * x

        @ceqx.filter_chunk(chunk_size=5, in_axes=(None, 0))
        def batched(self, x):
            return self.weight * x

    model = Model(jnp.asarray(3.0))
    assert_same(model(X), 3 * X)
    assert_same(model.batched(X), 3 * X)
    grads = eqx.filter_grad(lambda m: m(X).sum())(model)
    assert_same(grads.weight, X.sum())


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5, 13, 14, 20])
def test_num_chunks(num_chunks):
    seen = []

    def batched(x):
        seen.append(x.shape[0])
        return jnp.sin(x)

    f = ceqx.filter_chunk(batched, num_chunks=num_chunks)
    assert_same(f(X), jnp.sin(X))
    assert seen == [-(-14 // num_chunks)]


def test_chunks_of_a_batched_function_have_one_shape():
    def batched(x, y, scale):
        assert x.shape == (5, 3)
        assert y.shape == (2, 5)
        return (x * scale, y.T), x.shape

    f = ceqx.filter_chunk(
        batched, chunk_size=5, in_axes=(0, 1, None), out_axes=((0, 0), None)
    )
    y = jr.normal(jr.key(1), (2, 14))
    (a, b), shape = f(X, y, jnp.asarray(2.0))
    assert_same((a, b), (2 * X, y.T))
    assert shape == (5, 3)


def test_outputs_that_do_not_depend_on_the_rows():
    def f(x, w):
        return x * w, w + 1, jr.key(3)

    for wrap in (ceqx.filter_vmap, ceqx.filter_chunk):
        g = wrap(f, chunk_size=5, in_axes=(0, None), out_axes=(0, None, None))
        w = jnp.asarray(2.0)
        assert_same(g(X, w), (X * w, w + 1, jr.key(3)))
        grad = jax.grad(lambda w: g(X, w)[0].sum() + g(X, w)[1])(w)
        assert_same(grad, X.sum() + 1)


@pytest.mark.parametrize("chunk_size", [None, 1, 5])
def test_axis_size(chunk_size):
    f = ceqx.filter_vmap(
        lambda w: w + 1, chunk_size=chunk_size, in_axes=None, axis_size=7
    )
    assert_same(f(jnp.ones(2)), jnp.full((7, 2), 2.0))


def test_modules_as_outputs():
    make = lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key)
    keys = jr.split(jr.key(0), 14)
    got = ceqx.filter_vmap(make, chunk_size=5)(keys)
    expected = eqx.filter_vmap(make)(keys)
    assert_same(eqx.filter(got, eqx.is_array), eqx.filter(expected, eqx.is_array))
    assert got.activation is expected.activation
    # And back in, as an ensemble.
    evaluate = lambda model, x: model(x)
    assert_same(
        ceqx.filter_vmap(evaluate, chunk_size=5)(got, X),
        eqx.filter_vmap(evaluate)(expected, X),
    )


def test_callables_that_are_not_functions():
    scale = jnp.asarray(3.0)
    partial = ft.partial(lambda x, y: x * y, scale)
    bound = eqx.nn.Linear(3, 2, key=jr.key(0)).__call__
    for f in (partial, eqx.Partial(lambda x, y: x * y, scale), jax.jit(jnp.sin), bound):
        assert_same(ceqx.filter_vmap(f, chunk_size=5)(X), jax.vmap(f)(X))


def test_is_a_module():
    linear = eqx.nn.Linear(3, 2, key=jr.key(0))
    f = ceqx.filter_vmap(linear, chunk_size=5)
    assert isinstance(f, eqx.Module)
    assert cast(Any, f).__wrapped__ == linear
    grads = eqx.filter_grad(lambda f: f(X).sum())(f)
    assert_same(grads.__wrapped__.bias, jnp.full(2, 14.0))
    assert f == ceqx.filter_vmap(linear, chunk_size=5)
    assert f != ceqx.filter_vmap(linear, chunk_size=6)


def test_effects_and_errors_inside():
    def f(x):
        return eqx.error_if(x, x < 0, "negative input") ** 2

    chunked = ceqx.filter_vmap(f, chunk_size=5)
    x = jnp.arange(14.0)
    assert_same(chunked(x), x**2)
    with pytest.raises(Exception, match="negative input"):
        chunked(x - 3)
    with pytest.raises(Exception, match="negative input"):
        eqx.filter_jit(jax.grad(lambda x: chunked(x).sum()))(x - 3)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data())
def test_random_axes(data):
    n, c = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 10))
    shape = data.draw(st.lists(st.integers(1, 3), max_size=2))
    ndim = len(shape) + 1
    in_axis = data.draw(st.integers(-ndim, ndim - 1))
    out_axis = data.draw(st.integers(-ndim, ndim - 1))
    full = list(shape)
    full.insert(in_axis % ndim, n)
    x = jnp.arange(float(jnp.prod(jnp.array(full)))).reshape(full)
    options: dict[str, Any] = dict(in_axes=in_axis, out_axes=(out_axis, 0, None))
    f = lambda x: (jnp.sin(x), x.sum(), "static")
    got = ceqx.filter_vmap(f, chunk_size=c, **options)(x)
    assert_same(got, eqx.filter_vmap(f, **options)(x))
