import io

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import chunked_eqx as ceqx

from .helpers import assert_same, loss


N = 14
SIZES = [
    pytest.param(c, marks=() if c in (1, 5) else pytest.mark.slow)
    for c in (None, 1, 5, 7, 13, 14, 20)
]
X = jr.normal(jr.key(0), (N, 3))
MLP = eqx.nn.MLP(3, 2, 8, 2, key=jr.key(1))


class _DropoutNet(eqx.Module):
    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    second: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jr.split(key)
        self.first = eqx.nn.Linear(3, 8, key=k1)
        self.dropout = eqx.nn.Dropout(0.5)
        self.second = eqx.nn.Linear(8, 2, key=k2)

    def __call__(self, x, *, key=None):
        return self.second(self.dropout(jnp.tanh(self.first(x)), key=key))


DROPOUT_NET = _DropoutNet(jr.key(2))


@pytest.mark.parametrize("chunk_size", SIZES)
@pytest.mark.parametrize("make_key", [jr.key, jr.PRNGKey], ids=["typed", "raw"])
def test_one_key_is_split_into_one_for_each_row(make_key, chunk_size):
    key = make_key(7)
    draws = lambda x, key: (jr.bits(key, (3,)), jr.bernoulli(key, 0.3, x.shape))
    expected = jax.vmap(draws)(X, jr.split(key, N))
    model = ceqx.Chunked(draws, chunk_size)
    # Draws are the same bit for bit.
    assert eqx.tree_equal(model(X, key=key), expected)
    assert eqx.tree_equal(model(X, key=jr.split(key, N)), expected)
    assert eqx.tree_equal(eqx.filter_jit(model)(X, key=key), expected)


@pytest.mark.parametrize("chunk_size", SIZES)
def test_dropout_is_replayed_in_the_backward_pass(chunk_size):
    key = jr.key(3)

    def plain(model, x):
        return loss(jax.vmap(lambda x, k: model(x, key=k))(x, jr.split(key, N)))

    def chunked(model, x):
        return loss(ceqx.Chunked(model, chunk_size)(x, key=key))

    assert_same(
        eqx.filter_value_and_grad(chunked)(DROPOUT_NET, X),
        eqx.filter_value_and_grad(plain)(DROPOUT_NET, X),
    )


def test_key_none_and_inference_mode():
    model = eqx.nn.inference_mode(ceqx.Chunked(DROPOUT_NET, 5))
    assert model.module.dropout.inference
    plain = eqx.nn.inference_mode(DROPOUT_NET)
    assert_same(model(X, key=None), jax.vmap(plain)(X))
    assert_same(model(X), jax.vmap(plain)(X))


def test_a_key_whose_axis_is_given_is_not_split():
    key = jr.key(7)
    draws = lambda x, key: x + jr.normal(key, (3,))
    model = ceqx.Chunked(draws, 5, in_axes={"key": None})
    assert_same(model(X, key=key), X + jr.normal(key, (1, 3)))


@pytest.mark.parametrize("chunk_size", SIZES)
def test_batched_modules(chunk_size):
    batched = lambda x, key=None: jax.vmap(MLP)(x)
    model = ceqx.Chunked(batched, chunk_size, batched=True)
    assert_same(model(X), jax.vmap(MLP)(X))
    draws = lambda x, key: x + jax.vmap(lambda k: jr.normal(k, (3,)))(key)
    model = ceqx.Chunked(draws, chunk_size, batched=True)
    assert_same(model(X, key=jr.key(1)), draws(X, jr.split(jr.key(1), N)))


class _Counter(eqx.Module):
    index: eqx.nn.StateIndex
    linear: eqx.nn.Linear

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.asarray(0))
        self.linear = eqx.nn.Linear(3, 2, key=jr.key(0))

    def __call__(self, x, state):
        count = state.get(self.index)
        return self.linear(x) * count.astype(x.dtype), state.set(self.index, count + 1)


@pytest.mark.parametrize("chunk_size", SIZES)
def test_state_is_updated_once(chunk_size):
    module, state = eqx.nn.make_with_state(_Counter)()
    model = ceqx.Chunked(module, chunk_size)
    plain = jax.vmap(module, in_axes=(0, None), out_axes=(0, None))
    expected, expected_state = plain(X, state)
    for _ in range(3):
        y, state = model(X, state)
        assert_same(y, expected)
        assert state.get(module.index) == expected_state.get(module.index)
        expected, expected_state = plain(X, expected_state)


def test_serialisation_both_ways():
    other = eqx.nn.MLP(3, 2, 8, 2, key=jr.key(9))
    for saved, loaded in [
        (MLP, ceqx.Chunked(other, 5)),
        (ceqx.Chunked(MLP, 5), other),
    ]:
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, saved)
        file.seek(0)
        result = eqx.tree_deserialise_leaves(file, loaded)
        assert file.read() == b""
        result = result.module if isinstance(result, ceqx.Chunked) else result
        assert_same(eqx.filter(result, eqx.is_array), eqx.filter(MLP, eqx.is_array))


def test_adds_no_leaves():
    model = ceqx.Chunked(MLP, 5, in_axes=(0,), out_axes={"a": 0})
    assert jtu.tree_leaves(model) == jtu.tree_leaves(MLP)


def test_tree_surgery_and_ensembles():
    model = ceqx.Chunked(MLP, 5)
    zero = jnp.zeros_like(MLP.layers[0].weight)
    changed = eqx.tree_at(lambda m: m.module.layers[0].weight, model, zero)
    expected = eqx.tree_at(lambda m: m.layers[0].weight, MLP, zero)
    assert_same(changed(X), jax.vmap(expected)(X))

    params, static = eqx.partition(model, eqx.is_array)
    assert_same(eqx.combine(params, static)(X), model(X))

    make = lambda key: ceqx.Chunked(eqx.nn.MLP(3, 2, 8, 1, key=key), 5)
    ensemble = eqx.filter_vmap(make)(jr.split(jr.key(0), 4))
    got = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))(
        ensemble, X
    )
    expected = eqx.filter_vmap(
        lambda m, x: jax.vmap(m)(x), in_axes=(eqx.if_array(0), None)
    )(ensemble.module, X)
    assert_same(got, expected)


def test_repr_equality_and_hash():
    model = ceqx.Chunked(jnp.tanh, 5)
    assert repr(model).startswith("Chunked(\n  module=<")
    assert "chunk_size=5" in repr(model)
    assert "_options" not in repr(model)
    assert model == ceqx.Chunked(jnp.tanh, 5)
    assert model != ceqx.Chunked(jnp.tanh, 6)
    assert hash(model) == hash(ceqx.Chunked(jnp.tanh, 5))


def test_gradients_have_the_structure_of_the_model():
    model = ceqx.Chunked(MLP, 5)
    grads = eqx.filter_grad(lambda m: loss(m(X)))(model)
    updated = eqx.apply_updates(model, grads)
    assert isinstance(updated, ceqx.Chunked)
    assert updated.chunk_size == 5
    plain = eqx.filter_grad(lambda m: loss(jax.vmap(m)(X)))(MLP)
    assert_same(grads.module, plain)


def test_bfloat16_gradients_are_as_good_as_unchunked():
    n = 4096
    x = jr.normal(jr.key(3), (n, 3))
    y = jnp.sin(x[:, :2])
    cast = lambda tree, dtype: jax.tree.map(
        lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a, tree
    )

    def gradient(dtype, wrap):
        def mse(model, x, y):
            return jnp.mean(((wrap(model)(x) - y) ** 2).astype(jnp.float32))

        grads = eqx.filter_grad(mse)(*cast((MLP, x, y), dtype))
        leaves = [np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(grads)]
        return np.concatenate(leaves)

    exact = gradient(jnp.float32, jax.vmap)
    error = lambda got: np.linalg.norm(got - exact) / np.linalg.norm(exact)
    chunk = lambda **options: lambda module: ceqx.Chunked(module, 16, **options)
    unchunked = error(gradient(jnp.bfloat16, jax.vmap))
    chunked = error(gradient(jnp.bfloat16, chunk()))
    stalled = error(gradient(jnp.bfloat16, chunk(accumulate_dtype=jnp.bfloat16)))
    assert stalled > 3 * unchunked
    assert chunked < 1.2 * unchunked
