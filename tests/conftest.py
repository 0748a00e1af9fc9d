import importlib.metadata
import os

import pytest


# Without it XLA:CPU may report no temporaries at all for a forward pass. Has to be set
# before JAX starts, and XLA aborts on flags that it does not know yet.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) >= (0, 9):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_experimental_ynn_fusion_type="

import jax
import jax.random as jr


jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def getkey():
    """A function that returns a new typed PRNG key on every call, reproducibly."""
    key = jr.key(0)

    def next_key():
        nonlocal key
        key, subkey = jr.split(key)
        return subkey

    return next_key
