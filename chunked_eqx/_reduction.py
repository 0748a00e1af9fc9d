import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree


@dataclasses.dataclass(frozen=True)  # Not a pytree: a leaf of `reduction=`.
class Reduction:
    """How rows become one value without all of them being in memory.

    ```
    value = chunk(rows of chunk 0)
    for each further chunk:
        value = combine(value, chunk(rows of that chunk))
    result = finalize(value)
    ```

    Every row is seen exactly once, and the first chunk is the seed: `combine` needs no
    neutral element. One value is in memory beside one chunk.

    **Arguments:**

    - `chunk`: takes the output (or the subtree of it) at which the reduction stands,
        every array with a leading axis of rows, any number of them from 1 up; returns
        a pytree of arrays whose shapes do not depend on the number of rows.
    - `combine`: takes two such values, that of the earlier rows first, and returns one
        of the same structure, shapes and dtypes. Must be associative for the result
        not to depend on the chunk size.
    - `finalize`: takes the last value and returns the result. `None`: as it is.

    **Raises:**

    `ValueError` when called if `combine` changes structure, shape or dtype.

    !!! example

        Log-sum-exp over all rows, stable and in one pass.

        ```python
        >>> import jax, jax.numpy as jnp, chunked_eqx as ceqx
        >>> logsumexp = ceqx.Reduction(
        ...     chunk=lambda x: jax.nn.logsumexp(x, axis=0), combine=jnp.logaddexp
        ... )
        >>> f = ceqx.filter_vmap(lambda x: -x**2, chunk_size=3, reduction=logsumexp)
        >>> print(f(jnp.arange(10.0)).round(4))
        0.3267

        ```
    """

    chunk: Callable[[Any], Any]
    combine: Callable[[Any, Any], Any]
    finalize: Callable[[Any], Any] | None = None


NAMES = ("sum", "mean", "min", "max", "prod")


def check_reduction(reduction: PyTree[Any]) -> None:
    """Raise unless every leaf is `None`, one of the names or a `Reduction`."""
    for leaf in jtu.tree_leaves(reduction):
        if leaf not in NAMES and not isinstance(leaf, Reduction):
            raise ValueError(
                f"`reduction` must consist of None, {', '.join(map(repr, NAMES))} and "
                f"`Reduction`s, got {leaf!r}."
            )


def named_reduction(
    name: str, dtype: DTypeLike, accumulate_dtype: DTypeLike
) -> Reduction:
    """The reduction that gives what `jnp.sum`, `jnp.mean`, ... give for all rows."""
    result_dtype = jax.eval_shape(
        lambda x: getattr(jnp, name)(x, axis=0), jax.ShapeDtypeStruct((1,), dtype)
    ).dtype
    # Whatever chunks are added up in is at least `accumulate_dtype` wide: 4096 ones
    # added one by one in bfloat16 make 256.
    wide = wider(result_dtype, accumulate_dtype)

    if name == "sum":
        return Reduction(
            lambda x: jnp.sum(x, axis=0, dtype=wide),
            jnp.add,
            lambda total: total.astype(result_dtype),
        )
    if name == "mean":
        # The count travels with the sum, so this is never a mean of means.
        return Reduction(
            lambda x: (jnp.sum(x, axis=0, dtype=wide), jnp.asarray(x.shape[0], int)),
            lambda a, b: (a[0] + b[0], a[1] + b[1]),
            lambda v: (v[0] / v[1].astype(v[0].dtype)).astype(result_dtype),
        )
    if name == "prod":
        return Reduction(
            lambda x: jnp.prod(x, axis=0, dtype=wide),
            jnp.multiply,
            lambda total: total.astype(result_dtype),
        )
    return _extremum(name)


def wider(dtype: DTypeLike, accumulate_dtype: DTypeLike) -> jnp.dtype:
    """`dtype`, or `accumulate_dtype` where that is the wider floating type."""
    dtype = jnp.dtype(dtype)
    is_narrow = (
        jnp.issubdtype(dtype, jnp.floating)
        and jnp.finfo(dtype).bits < jnp.finfo(accumulate_dtype).bits
    )
    return jnp.dtype(accumulate_dtype) if is_narrow else dtype


def _extremum(name: str) -> Reduction:
    """`jnp.min` or `jnp.max` over the rows, derivative at ties included.

    Where `c` rows share the extremum, JAX gives each of them `1 / c` of the cotangent.
    Chunk by chunk the same comes out only if the number of ties is known, so the value
    is the pair (extremum, ties), and values `a` and `b` combine to

        m = max(a.m, b.m)                 c = [a.m == m] a.c + [b.m == m] b.c
        dm = ([a.m == m] a.c / c) da.m + ([b.m == m] b.c / c) db.m
    """
    reduce, pick = (jnp.max, jnp.maximum) if name == "max" else (jnp.min, jnp.minimum)

    def chunk(x):
        if x.shape[0] == 0:
            raise ValueError(
                f'`reduction="{name}"` of a batch without rows is not defined. Check '
                "for an empty batch before calling."
            )
        m = reduce(x, axis=0)
        return m, jnp.sum(x == m[None], axis=0)

    def combine(a, b):
        (ma, ca), (mb, cb) = a, b
        # Constants for the derivative; what is differentiated is `_join` below.
        m = pick(jax.lax.stop_gradient(ma), jax.lax.stop_gradient(mb))
        ca, cb = jnp.where(ma == m, ca, 0), jnp.where(mb == m, cb, 0)
        return _join(m, ma, mb, ca, cb), ca + cb

    return Reduction(chunk, combine, lambda value: value[0])


@jax.custom_jvp
def _join(m: Array, ma: Array, mb: Array, ca: Array, cb: Array) -> Array:
    del ma, mb, ca, cb
    return m


@_join.defjvp
def _join_jvp(primals, tangents):
    m, _, _, ca, cb = primals
    _, dma, dmb, _, _ = tangents
    if not eqx.is_inexact_array(m):
        return m, dma
    share = ca.astype(m.dtype) / (ca + cb).astype(m.dtype)
    return m, share * dma + (1 - share) * dmb


def value_of(rule: Reduction, rows: PyTree[Any]) -> PyTree[Array]:
    """`rule.chunk`, its results as arrays that keep their dtype in arithmetic."""
    return jtu.tree_map(strong, rule.chunk(rows))


def combine_values(rule: Reduction, a: PyTree[Array], b: PyTree[Array]):
    """`rule.combine`, checked: a loop needs a value of the same kind every time."""
    out = jtu.tree_map(strong, rule.combine(a, b))
    got, expected = (jax.eval_shape(lambda x: x, x) for x in (out, a))
    if not eqx.tree_equal(got, expected):
        raise ValueError(
            "`Reduction.combine` must return a value of the structure, shapes and "
            f"dtypes that it is given. Expected {eqx.tree_pformat(expected)}; got "
            f"{eqx.tree_pformat(got)}."
        )
    return out


def strong(x: Any) -> Array:
    """`x` as an array without a weak type."""
    x = jnp.asarray(x)
    return x.astype(x.dtype)
