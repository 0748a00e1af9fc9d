"""What is held in memory, and how often a function is traced."""

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest

import chunked_eqx as ceqx

from .helpers import loss, temporaries


WIDTH, C = 256, 64
MLP = eqx.nn.MLP(16, 4, WIDTH, 3, key=jr.key(0))
PARAMS, STATIC = eqx.partition(MLP, eqx.is_array)
ONE_ROW = WIDTH * 4


def _batch(n, axis=0):
    shape = [16]
    shape.insert(axis, n)
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)


def _chunked(params, x, **kwargs):
    model = eqx.combine(params, STATIC)
    return ceqx.filter_vmap(model, chunk_size=C, **kwargs)(x)


def _plain(params, x):
    return jax.vmap(eqx.combine(params, STATIC))(x)


def _by_hand(params, x):
    @jax.checkpoint
    def chunk(params, x):
        return jax.vmap(eqx.combine(params, STATIC))(x)

    x = x.reshape(-1, C, 16)
    return lax.scan(lambda _, x: (None, chunk(params, x)), None, x)[1].reshape(-1, 4)


def _grad(fun, argnums: int | tuple[int, ...] = 0):
    return jax.grad(lambda params, x: jnp.mean(fun(params, x) ** 2), argnums)


@pytest.mark.parametrize("transform", [lambda f: f, _grad], ids=["forward", "grad"])
def test_memory_does_not_grow_with_the_batch(transform):
    small, large = _batch(16 * C), _batch(64 * C)
    outputs = 4 * 4 * (large.shape[0] - small.shape[0])
    growth = lambda f: temporaries(f, PARAMS, large) - temporaries(f, PARAMS, small)
    assert growth(transform(_plain)) > 40 * C * ONE_ROW
    # Where it is differentiated, once the outputs and once their cotangent.
    assert growth(transform(_chunked)) <= 2 * outputs


@pytest.mark.parametrize("transform", [lambda f: f, _grad], ids=["forward", "grad"])
def test_memory_is_that_of_a_scan_by_hand(transform):
    x = _batch(32 * C)
    by_hand = temporaries(transform(_by_hand), PARAMS, x)
    assert temporaries(transform(_chunked), PARAMS, x) <= 1.05 * by_hand


@pytest.mark.parametrize("transform", [lambda f: f, _grad], ids=["forward", "grad"])
def test_a_ragged_batch_costs_no_memory(transform):
    even = temporaries(transform(_chunked), PARAMS, _batch(32 * C))
    ragged = temporaries(transform(_chunked), PARAMS, _batch(32 * C - 1))
    outputs = 4 * 4 * 32 * C
    assert ceqx.ChunkPlan.make(32 * C - 1, C).overlap == 1
    assert ragged <= even + (0 if transform is not _grad else 2 * outputs) + C * 16


def test_inputs_are_not_copied():
    # Neither for another axis, nor for a cotangent, of which there is one.
    n = 256 * C
    along_1 = lambda x: ceqx.filter_vmap(MLP, chunk_size=C, in_axes=1)(x)
    assert temporaries(along_1, _batch(n, axis=1)) < 8 * C * ONE_ROW
    grads = temporaries(_grad(_chunked, argnums=(0, 1)), PARAMS, _batch(n))
    assert grads < temporaries(_grad(_chunked), PARAMS, _batch(n)) + 4 * C * ONE_ROW


def test_reduced_rows_are_not_stored():
    wide = lambda x: jnp.outer(x, jnp.ones(64)).ravel()
    f = ceqx.filter_vmap(wide, chunk_size=C, reduction="mean")
    x = _batch(256 * C)
    rows = 4 * 16 * 64 * x.shape[0]
    assert temporaries(f, x) < rows / 50
    grad = jax.grad(lambda x: f(x).sum())
    assert temporaries(grad, x) < rows / 50 + 4 * 16 * x.shape[0]
    # The plain gradient of a sum needs none either; that of a square does.
    square = lambda f: jax.grad(lambda x: (f(x) ** 2).sum())
    assert temporaries(square(f), x) < rows / 50 + 4 * 16 * x.shape[0]


def test_inference_makes_no_wide_copy_of_the_parameters():
    bf16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    x = _batch(16 * C).update(dtype=jnp.bfloat16)
    wide = sum(4 * leaf.size for leaf in jax.tree.leaves(bf16))
    # Some of it is what XLA:CPU, which has no bfloat16 arithmetic, makes of a chunk.
    by_hand = temporaries(_by_hand, bf16, x)
    assert temporaries(_chunked, bf16, x) < by_hand + wide / 10


def test_remat_off_and_policies():
    x = _batch(32 * C)
    on = temporaries(_grad(_chunked), PARAMS, x)
    off = temporaries(_grad(lambda p, x: _chunked(p, x, remat=False)), PARAMS, x)
    everything = jax.checkpoint_policies.everything_saveable
    policy = temporaries(
        _grad(lambda p, x: _chunked(p, x, remat=everything)), PARAMS, x
    )
    assert off > 5 * on
    assert policy > 5 * on


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 5, 14, 20])
@pytest.mark.parametrize("reduction", [None, "mean"])
def test_traced_once(chunk_size, reduction):
    count = 0

    def row(x):
        nonlocal count
        count += 1
        return jnp.sin(x)

    x = jnp.arange(14.0)
    f = ceqx.filter_vmap(row, chunk_size=chunk_size, reduction=reduction)
    f(x)
    assert count == 1
    f(x + 1)
    assert count == 1
    # A derivative is another program; but one trace is enough for it, too.
    grad = jax.jit(jax.grad(lambda x: loss(f(x))))
    grad(x)
    grad(x + 1)
    assert count == 2
    eager_grad = jax.grad(lambda x: loss(f(x)))
    before = count
    eager_grad(x)
    eager_grad(x + 1)
    assert count == before
    f(jnp.arange(15.0))
    assert count == before + 1


def test_a_new_wrapper_of_the_same_module_is_not_traced_again():
    count = 0

    class Model(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            nonlocal count
            count += 1
            return self.weight * x

    x = jnp.arange(14.0)
    for i in range(3):
        model = ceqx.Chunked(Model(jnp.asarray(float(i))), 4)
        assert jnp.array_equal(model(x), i * x)
    assert count == 1


def test_narrow_gradients_are_added_up_in_wide():
    n = 4096
    x, w = jnp.ones(n, jnp.bfloat16), jnp.ones((), jnp.bfloat16)

    def grad(accumulate_dtype):
        def total(w):
            f = ceqx.filter_vmap(
                lambda x: w * x, chunk_size=1, accumulate_dtype=accumulate_dtype
            )
            return jnp.sum(f(x))

        return jax.grad(total)(w)

    assert grad(jnp.float32).dtype == jnp.bfloat16
    assert grad(jnp.float32) == n
    # Without, the sum stalls where one is below half the spacing of the numbers.
    assert grad(jnp.bfloat16) == 256
