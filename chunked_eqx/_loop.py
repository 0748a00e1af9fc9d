import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.lax as lax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from ._cpu_conv import fast_convolutions
from ._plan import ChunkPlan
from ._reduction import wider


# What one chunk gives: arrays whose rows are kept, arrays that are the same for every
# chunk, and values that are combined over the chunks.
ChunkOut = tuple[list[Array], list[Array], list[PyTree[Array]]]


def over_chunks(
    chunk: Callable[[list[Array], int], ChunkOut],
    plan: ChunkPlan,
    leaves: Sequence[Array],
    in_axes: Sequence[int | None],
    kept_axes: Sequence[int],
    combines: Sequence[Callable[[Any, Any], Any]],
    *,
    remat: bool | Callable[..., Any],
    accumulate_dtype: DTypeLike,
) -> ChunkOut:
    """Evaluate `chunk` on all chunks of `leaves`: the one loop of this library.

    ```
    for start in plan.starts:
        kept_i, same, value_i = chunk(leaves[start : start + rows], fresh)
    return concatenate(kept_i), same, combine(... combine(value_0, value_1) ...)
    ```

    `chunk(leaves, fresh)` gets all leaves, those with an axis in `in_axes` cut down to
    `plan.rows` rows. Only the first `fresh` of these may enter the values, since the
    others come again in the next chunk. It must not close over tracers.

    The loop runs over start indices and closes over whole inputs, which it slices
    inside the rematerialised body: whatever the axis, and whether or not the chunks
    divide the batch, no input is copied or transposed, and the cotangent of an input
    is added up in place.

    There are two programs, told apart by `jax.custom_jvp`. Where nothing is
    differentiated, rows are written straight to their place in the result, and
    parameters are used as they are. The transpose of such writes is slow (six times
    the gradient of an MLP), so the differentiated program stacks the chunks instead.
    It recomputes each chunk in the backward pass (`remat`), and takes parameters
    narrower than `accumulate_dtype` from a wide copy, since the cotangent of what a
    loop closes over is added up in the dtype of the copy.
    """
    if plan.chunks == 1:
        return chunk(list(leaves), plan.rows)
    loop = ft.partial(_loop, plan, in_axes, kept_axes, combines)

    # Everything traced comes in as an argument: a tracer closed over has no meaning any
    # more when the rule is called.
    @jax.custom_jvp
    def evaluate(*leaves):
        return loop(chunk, leaves, stacked=False, remat=False)

    @ft.partial(evaluate.defjvp, symbolic_zeros=True)
    def evaluate_jvp(primals, tangents):
        varies = [not isinstance(t, SymbolicZero) for t in tangents]
        dtypes = [x.dtype for x in primals]

        def narrow_chunk(leaves, fresh):
            return chunk([_cast(x, d) for x, d in zip(leaves, dtypes)], fresh)

        def differentiable(*moving):
            moving = iter(moving)
            leaves = [next(moving) if v else x for x, v in zip(primals, varies)]
            wide = [
                _cast(x, wider(x.dtype, accumulate_dtype)) if v and a is None else x
                for x, v, a in zip(leaves, varies, in_axes)
            ]
            return loop(narrow_chunk, wide, stacked=True, remat=remat)

        moving = tuple(x for x, v in zip(primals, varies) if v)
        tangents = tuple(t for t, v in zip(tangents, varies) if v)
        return jax.jvp(differentiable, moving, tangents)

    return evaluate(*leaves)


def _cast(x: Array, dtype: Any) -> Array:  # The dtype may be that of a PRNG key.
    return x if x.dtype == dtype else x.astype(dtype)


def _loop(plan, in_axes, kept_axes, combines, chunk, leaves, *, stacked, remat):
    def at(start, fresh=plan.rows):
        rows = [
            x if axis is None else lax.dynamic_slice_in_dim(x, start, plan.rows, axis)
            for x, axis in zip(leaves, in_axes)
        ]
        return chunk(rows, fresh)

    def put(buffers, rows, start):
        return [
            lax.dynamic_update_slice_in_dim(x, y, start, axis)
            for x, y, axis in zip(buffers, rows, kept_axes)
        ]

    starts = np.asarray(plan.starts, np.int32)
    kept, same, _ = jax.eval_shape(at, starts[0])
    # Neither zero is ever read: all rows are written, and `same` is replaced.
    same = [jnp.zeros(x.shape, x.dtype) for x in same]
    buffers = []
    if not stacked:
        shapes = [_with_size(x.shape, a, plan.n) for x, a in zip(kept, kept_axes)]
        buffers = [jnp.zeros(shape, x.dtype) for shape, x in zip(shapes, kept)]
    seeded, values = [], []
    if combines:
        # The first chunk, ahead of the loop, seeds the values; the overlap of a ragged
        # batch is left to the second.
        first = ft.partial(at, fresh=plan.rows - plan.overlap)
        seeded, same, values = _remat(first, remat, prevent_cse=True)(starts[0])
        buffers = put(buffers, seeded, starts[0])
        starts = starts[1:]

    def body(carry, start):
        buffers, _, values = carry
        kept, same, more = _remat(at, remat, prevent_cse=False)(start)
        # Outside of what is rematerialised: else each step's `values` would be stored.
        values = [f(v, w) for f, v, w in zip(combines, values, more)]
        if stacked:
            return ([], same, values), kept
        return (put(buffers, kept, start), same, values), None

    with fast_convolutions():
        carry, stacks = lax.scan(body, (buffers, same, values), starts)
    buffers, same, values = carry
    if stacked:
        heads = seeded if combines else [None] * len(kept_axes)
        buffers = [
            _unstack(plan, head, stack, axis)
            for head, stack, axis in zip(heads, stacks or [], kept_axes)
        ]
    return buffers, same, values


def _remat(fun, remat, *, prevent_cse):
    if remat is False:
        return fun
    policy = None if remat is True else remat
    return jax.checkpoint(fun, prevent_cse=prevent_cse, policy=policy)


def _unstack(plan, head, stack, axis):
    """The rows of `head`, `stack[0]`, `stack[1]`, ..., each once, along `axis`."""
    if head is None and plan.overlap:
        head, stack = stack[0], stack[1:]
    chunks, *shape = stack.shape
    rows = jnp.moveaxis(stack, 0, axis).reshape(
        _with_size(shape, axis, chunks * plan.rows)
    )
    if head is None:
        return rows
    fresh = plan.rows - plan.overlap
    return jnp.concatenate([lax.slice_in_dim(head, 0, fresh, axis=axis), rows], axis)


def _with_size(shape, axis, size):
    return (*shape[:axis], size, *shape[axis + 1 :])
