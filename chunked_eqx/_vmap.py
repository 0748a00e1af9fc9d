from collections.abc import Callable
from typing import Any, overload

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ._axes import AxisSpec
from ._evaluate import compiled, evaluate, make_options, Options


_evaluate = compiled(evaluate)
_MISSING: Any = object()


class _ChunkedFunction(eqx.Module):
    _fun: Callable[..., Any]
    _options: Options = eqx.field(static=True)

    @property
    def __wrapped__(self):
        return self._fun

    def __call__(self, /, *args, **kwargs):
        return _evaluate(self._fun, self._options, args, kwargs)

    def __get__(self, instance, owner):
        del owner
        return self if instance is None else eqx.Partial(self, instance)


def _wrap(fun: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """The wrapped function, or a decorator where `fun` is yet to come."""
    if fun is _MISSING:
        return lambda fun: _wrap(fun, options)
    if not callable(fun):
        raise TypeError(f"Expected a function or a callable module, got {fun!r}.")
    return eqx.module_update_wrapper(_ChunkedFunction(fun, options))


@overload
def filter_vmap(
    *,
    chunk_size: int | None = None,
    num_chunks: int | None = None,
    in_axes: PyTree[AxisSpec] = eqx.if_array(0),
    out_axes: PyTree[AxisSpec] = eqx.if_array(0),
    axis_name: Any = None,
    axis_size: int | None = None,
    collectives: str = "batch",
    reduction: PyTree[Any] = None,
    remat: bool | Callable[..., Any] = True,
    accumulate_dtype: DTypeLike = jnp.float32,
    spmd_axis_name: Any = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


@overload
def filter_vmap(
    fun: Callable[..., Any],
    *,
    chunk_size: int | None = None,
    num_chunks: int | None = None,
    in_axes: PyTree[AxisSpec] = eqx.if_array(0),
    out_axes: PyTree[AxisSpec] = eqx.if_array(0),
    axis_name: Any = None,
    axis_size: int | None = None,
    collectives: str = "batch",
    reduction: PyTree[Any] = None,
    remat: bool | Callable[..., Any] = True,
    accumulate_dtype: DTypeLike = jnp.float32,
    spmd_axis_name: Any = None,
) -> Callable[..., Any]: ...


def filter_vmap(
    fun: Callable[..., Any] = _MISSING,
    *,
    chunk_size: int | None = None,
    num_chunks: int | None = None,
    in_axes: PyTree[AxisSpec] = eqx.if_array(0),
    out_axes: PyTree[AxisSpec] = eqx.if_array(0),
    axis_name: Any = None,
    axis_size: int | None = None,
    collectives: str = "batch",
    reduction: PyTree[Any] = None,
    remat: bool | Callable[..., Any] = True,
    accumulate_dtype: DTypeLike = jnp.float32,
    spmd_axis_name: Any = None,
) -> Callable[..., Any]:
    """`equinox.filter_vmap` that holds one chunk of the batch in memory at a time.

    ```
    for rows in chunks of the mapped arguments:
        out_i = equinox.filter_vmap(fun, in_axes, out_axes)(*rows, **rows)
    return concatenate(out_i, along out_axes)        # or their `reduction`
    ```

    Values, dtypes, structure and derivatives are those of `equinox.filter_vmap`, for
    every chunk size and batch size. Can be used as a decorator, with or without
    arguments.

    In memory are the arguments, the result and what one chunk needs; so it is in the
    backward pass, which computes each chunk again (`remat`). There in addition: the
    cotangents, and for parameters narrower than `accumulate_dtype` a wide copy.

    Called outside of `jax.jit`, the result compiles itself, once for each set of shapes
    and static arguments; as for every compiled function, `fun` must be pure.

    **Arguments:**

    - `fun`: a pure function of one row, `fun(*args, **kwargs)`. If it is a pytree (an
        Equinox module), its arrays are broadcast.
    - `chunk_size`: the most rows to evaluate together. `None`: all, which is the plain
        program.
    - `num_chunks`: instead of `chunk_size`, the most chunks to make.
    - `in_axes`: the axis of rows of each argument: `None` (broadcast), an integer, a
        callable `leaf -> int | None`, or a pytree of these that is a prefix of the
        tuple of positional arguments; or a dictionary by argument name, in which case
        arguments that it does not name are mapped as by default. A single axis holds
        for keyword arguments as well; with a tuple, they are mapped as by default.
        Default: every JAX and NumPy array along axis 0, all else broadcast.
    - `out_axes`: the axis of rows of each output, likewise a prefix of the output.
        `None` is for outputs that do not depend on the rows and come back once.
    - `axis_name`, `collectives`, `spmd_axis_name`: not supported yet.
    - `axis_size`: the number of rows, if no argument is mapped.
    - `reduction`: a prefix of the output, of `None` (keep the rows), `"sum"`,
        `"mean"`, `"min"`, `"max"`, `"prod"`, or a [`Reduction`][]. The rows of an
        output that is reduced are never in memory together.
    - `remat`: whether the backward pass computes each chunk again, instead of storing
        what the forward pass computed for all of them; or a `jax.checkpoint` policy.
    - `accumulate_dtype`: cotangents of broadcast floating arrays narrower than this,
        and sums of such outputs, are added up over the chunks in this dtype. The
        result has the dtype that it has without chunks.

    **Returns:**

    A function of the same arguments with a batch axis, whose outputs have one, too.

    **Raises:**

    `TypeError` or `ValueError`, with the path and shape of the array concerned: for
    options or axes that cannot be, for mapped arrays of unequal length, or none; for
    an output that differs from row to row where `out_axes` says `None`.

    !!! example

        ```python
        >>> import jax.numpy as jnp, chunked_eqx as ceqx
        >>> @ceqx.filter_vmap(chunk_size=2, in_axes=(0, None))
        ... def affine(x, scale):
        ...     return scale * x + 1
        >>> print(affine(jnp.arange(5.0), 2.0))
        [1. 3. 5. 7. 9.]

        ```

        The gradient of a mean over many rows, none of whose outputs is stored.

        ```python
        >>> import jax
        >>> def loss(w, x):
        ...     square = lambda x: (w * x) ** 2
        ...     return ceqx.filter_vmap(square, chunk_size=2, reduction="mean")(x)
        >>> print(jax.grad(loss)(3.0, jnp.arange(4.0)))
        21.0

        ```
    """
    options = make_options(
        per_row=True,
        chunk_size=chunk_size,
        num_chunks=num_chunks,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=axis_name,
        axis_size=axis_size,
        collectives=collectives,
        reduction=reduction,
        remat=remat,
        accumulate_dtype=accumulate_dtype,
        spmd_axis_name=spmd_axis_name,
    )
    return _wrap(fun, options)


@overload
def filter_chunk(
    *,
    chunk_size: int | None = None,
    num_chunks: int | None = None,
    in_axes: PyTree[AxisSpec] = eqx.if_array(0),
    out_axes: PyTree[AxisSpec] = eqx.if_array(0),
    reduction: PyTree[Any] = None,
    remat: bool | Callable[..., Any] = True,
    accumulate_dtype: DTypeLike = jnp.float32,
    spmd_axis_name: Any = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


@overload
def filter_chunk(
    fun: Callable[..., Any],
    *,
    chunk_size: int | None = None,
    num_chunks: int | None = None,
    in_axes: PyTree[AxisSpec] = eqx.if_array(0),
    out_axes: PyTree[AxisSpec] = eqx.if_array(0),
    reduction: PyTree[Any] = None,
    remat: bool | Callable[..., Any] = True,
    accumulate_dtype: DTypeLike = jnp.float32,
    spmd_axis_name: Any = None,
) -> Callable[..., Any]: ...


def filter_chunk(
    fun: Callable[..., Any] = _MISSING,
    *,
    chunk_size: int | None = None,
    num_chunks: int | None = None,
    in_axes: PyTree[AxisSpec] = eqx.if_array(0),
    out_axes: PyTree[AxisSpec] = eqx.if_array(0),
    reduction: PyTree[Any] = None,
    remat: bool | Callable[..., Any] = True,
    accumulate_dtype: DTypeLike = jnp.float32,
    spmd_axis_name: Any = None,
) -> Callable[..., Any]:
    """Evaluate a function of a batch on one chunk of the batch at a time.

    ```
    for rows in chunks of the mapped arguments:
        out_i = fun(*rows, **rows)
    return concatenate(out_i, along out_axes)        # or their `reduction`
    ```

    As [`filter_vmap`][], for a function that takes many rows already and treats them
    independently of each other: the output for a row may not depend on which others
    are in the batch. (A row may be evaluated twice, but enters a reduction once.) For a
    loss, which mixes rows, use `reduction=` on the losses of the rows.

    Memory, compilation and errors are those of [`filter_vmap`][].

    **Arguments:**

    - `fun`: a pure function of a batch. If it is a pytree, its arrays are broadcast.
    - `out_axes`: where `fun` has the axis of rows in each of its outputs. `None` is for
        outputs that do not depend on the rows and come back once.
    - `chunk_size`, `num_chunks`, `in_axes`, `reduction`, `remat`, `accumulate_dtype`,
        `spmd_axis_name`: as for [`filter_vmap`][].

    **Returns:**

    A function of the same arguments and with the same outputs.

    **Raises:**

    As [`filter_vmap`][]; also where an output does not have one entry for each row
    along the axis that `out_axes` gives.

    !!! example

        ```python
        >>> import jax.numpy as jnp, chunked_eqx as ceqx
        >>> norms = ceqx.filter_chunk(
        ...     lambda x: jnp.linalg.norm(x, axis=-1), chunk_size=2
        ... )
        >>> print(norms(jnp.ones((5, 4))))
        [2. 2. 2. 2. 2.]

        ```
    """
    options = make_options(
        per_row=False,
        chunk_size=chunk_size,
        num_chunks=num_chunks,
        in_axes=in_axes,
        out_axes=out_axes,
        reduction=reduction,
        remat=remat,
        accumulate_dtype=accumulate_dtype,
        spmd_axis_name=spmd_axis_name,
    )
    return _wrap(fun, options)
