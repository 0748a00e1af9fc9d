import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np


def assert_same(got, expected, rtol=2e-5, atol=1e-6):
    """Equal in structure, static leaves, shapes, dtypes and values."""
    assert jtu.tree_structure(got) == jtu.tree_structure(expected)
    for (path, x), y in zip(
        jtu.tree_leaves_with_path(got), jtu.tree_leaves(expected), strict=True
    ):
        where = jtu.keystr(path)
        if not eqx.is_array(y):
            assert x == y, where
            continue
        assert eqx.is_array(x), where
        assert x.shape == y.shape, where
        assert x.dtype == y.dtype, where
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            wide = np.complex128 if jnp.iscomplexobj(x) else np.float64
            x, y = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
            np.testing.assert_allclose(x, y, rtol, atol, err_msg=where)
        else:
            np.testing.assert_array_equal(x, y, err_msg=where)


def loss(out):
    """A scalar that depends on every inexact entry of `out`, unevenly."""
    total = jnp.zeros(())
    for x in jtu.tree_leaves(eqx.filter(out, eqx.is_inexact_array)):
        flat = jnp.ravel(x)
        flat = flat.real + 2 * flat.imag if jnp.iscomplexobj(flat) else flat
        flat = flat.astype(jnp.float32)
        total = total + jnp.sum(jnp.sin(flat + jnp.arange(flat.size, dtype=flat.dtype)))
    return total


def tangents_of(tree):
    """Some tangent for every inexact array of `tree`, `None` for the rest."""
    return jtu.tree_map(lambda x: jnp.cos(x) if eqx.is_inexact_array(x) else None, tree)


def temporaries(fun, *args):
    """Bytes of compiled temporaries of `fun`, which is not run."""
    compiled = jax.jit(fun).lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes
