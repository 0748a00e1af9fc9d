import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.lax as lax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from ._axes import (
    batch_size,
    Frozen,
    Kept,
    never,
    Outputs,
    Reduced,
    resolve_in_axes,
    Same,
    split_outputs,
)
from ._loop import ChunkOut, over_chunks
from ._plan import check_sizes, ChunkPlan
from ._reduction import (
    check_reduction,
    combine_values,
    named_reduction,
    Reduction,
    strong,
    value_of,
)


@dataclasses.dataclass(frozen=True)  # Static for jit, hence hashable and not a pytree.
class Options:
    """What the public functions have in common, checked."""

    per_row: bool
    chunk_size: int | None
    num_chunks: int | None
    in_axes: Frozen
    out_axes: Frozen
    axis_size: int | None
    reduction: Frozen
    remat: bool | Callable[..., Any]
    accumulate_dtype: np.dtype
    # Nodes of arguments and results for which this holds are never mapped.
    is_broadcast: Callable[[Any], bool]


def make_options(
    *,
    per_row: bool,
    chunk_size: Any,
    num_chunks: Any = None,
    in_axes: PyTree[Any],
    out_axes: PyTree[Any],
    axis_size: Any = None,
    axis_name: Any = None,
    collectives: Any = "batch",
    reduction: PyTree[Any] = None,
    remat: Any,
    accumulate_dtype: Any,
    spmd_axis_name: Any = None,
    is_broadcast: Callable[[Any], bool] = never,
) -> Options:
    """Check the options that all public functions share."""
    chunk_size, num_chunks = check_sizes(chunk_size, num_chunks)
    check_reduction(reduction)
    if collectives not in ("batch", "chunk"):
        raise ValueError(
            f'`collectives` must be "batch" or "chunk", got {collectives!r}.'
        )
    if axis_name is not None or collectives == "chunk":
        raise NotImplementedError(
            "`axis_name` (collectives between the rows of a batch, as in BatchNorm) is "
            "not supported yet. Put such a layer into inference mode, or leave this "
            "part of the model to `jax.vmap(..., axis_name=...)`."
        )
    if spmd_axis_name is not None:
        raise NotImplementedError(
            "`spmd_axis_name` (batches that are sharded over devices) is not supported "
            "yet. Call within `jax.shard_map`, where each device sees its own rows."
        )
    if not (isinstance(remat, bool) or callable(remat)):
        raise TypeError(
            f"`remat` must be True, False or a `jax.checkpoint` policy, got {remat!r}."
        )
    if not jnp.issubdtype(accumulate_dtype, jnp.floating):
        raise TypeError(
            f"`accumulate_dtype` must be a floating dtype, got {accumulate_dtype!r}."
        )
    return Options(
        per_row=per_row,
        chunk_size=chunk_size,
        num_chunks=num_chunks,
        in_axes=Frozen(in_axes),
        out_axes=Frozen(out_axes),
        axis_size=axis_size,
        reduction=Frozen(reduction),
        remat=remat,
        accumulate_dtype=np.dtype(accumulate_dtype),
        is_broadcast=is_broadcast,
    )


def compiled(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, compiled where it is called eagerly: there a loop is traced on every call.

    Inside somebody's trace it is called as it is. That trace is cached already, and a
    second cache could only hold on to tracers.
    """
    jitted = eqx.filter_jit(fun)

    @ft.wraps(fun)
    def call(*args):
        return fun(*args) if _is_tracing() else jitted(*args)

    return call


def _is_tracing() -> bool:
    # Under a trace even the constants are staged.
    return isinstance(lax.neg(np.float32(0)), jax.core.Tracer)


def evaluate(
    fun: Callable[..., Any],
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree[Any]:
    """Call `fun` on the whole batch, one chunk at a time.

    `fun` is traced once, for one row (`options.per_row`) or for one chunk, as a
    function of a list of arrays: its own, those of the arguments, and those that it
    closes over. All that follows works on that function.
    """
    in_axes = resolve_in_axes(
        fun, options.in_axes.tree, args, kwargs, options.is_broadcast
    )
    n = batch_size(in_axes, args, kwargs, options.axis_size)
    plan = ChunkPlan.make(n, options.chunk_size, options.num_chunks)
    call, leaves, in_axes, outputs, structs = _trace(
        fun, options, plan, args, kwargs, in_axes
    )
    kept_axes = [slot.axis for slot in outputs.slots(Kept)]
    if options.per_row:
        call = jax.vmap(
            call,
            in_axes=(in_axes,),
            out_axes=(kept_axes, None, 0),
            axis_size=plan.rows,
        )
    rules = [
        slot.rule
        if isinstance(slot.rule, Reduction)
        else named_reduction(slot.rule, struct.dtype, options.accumulate_dtype)
        for slot, struct in zip(outputs.slots(Reduced), structs[2], strict=True)
    ]
    static = [slot.static for slot in outputs.slots(Reduced)]

    def chunk(leaves: list[Array], fresh: int) -> ChunkOut:
        kept, same, reduced = call(leaves)
        reduced = jtu.tree_map(lambda x: x[:fresh], reduced)
        reduced = [eqx.combine(x, s) for x, s in zip(reduced, static)]
        return kept, same, [value_of(rule, x) for rule, x in zip(rules, reduced)]

    kept, same, values = over_chunks(
        chunk,
        plan,
        leaves,
        in_axes,
        kept_axes,
        [ft.partial(combine_values, rule) for rule in rules],
        remat=options.remat,
        accumulate_dtype=options.accumulate_dtype,
    )
    # A loop cannot keep a weak type, and what an output promotes to must not depend on
    # the chunk size: so with a single chunk there is none either.
    kept, same = jtu.tree_map(strong, (kept, same))
    results = [r.finalize(v) if r.finalize else v for r, v in zip(rules, values)]
    return outputs.fill(kept, same, results)


def _trace(
    fun: Callable[..., Any],
    options: Options,
    plan: ChunkPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_axes: Sequence[int | None],
) -> tuple[Callable[[list[Array]], Any], list[Array], list[int | None], Outputs, Any]:
    """`fun` as a function of a list of arrays, with that list and its axes.

    Also returns where its outputs go, and their shapes.
    """
    rows = None if options.per_row else plan.rows
    everything, treedef = jtu.tree_flatten((fun, args, kwargs))
    # The arrays of `fun` itself come first and are broadcast.
    axes = [None] * (len(everything) - len(in_axes)) + list(in_axes)
    is_array = [eqx.is_array(x) for x in everything]
    leaves = [jnp.asarray(x) for x, keep in zip(everything, is_array) if keep]
    axes = [axis for axis, keep in zip(axes, is_array) if keep]

    def of_leaves(leaves):
        leaves = iter(leaves)
        full = [next(leaves) if a else x for x, a in zip(everything, is_array)]
        fun, args, kwargs = jtu.tree_unflatten(treedef, full)
        out = fun(*args, **kwargs)
        *arrays, outputs = split_outputs(
            out,
            options.out_axes.tree,
            options.reduction.tree,
            rows,
            options.is_broadcast,
        )
        return tuple(arrays), outputs

    structs = [_piece(x, axis, rows) for x, axis in zip(leaves, axes)]
    closed, (out_structs, _), (_, outputs) = eqx.filter_make_jaxpr(of_leaves)(structs)
    # What is called in the loop must not hold on to tracers, hence not to `closed`.
    jaxpr, consts = closed.jaxpr, [jnp.asarray(x) for x in closed.consts]
    out_treedef, num_leaves = jtu.tree_structure(out_structs), len(leaves)

    def call(leaves):
        leaves, consts = leaves[:num_leaves], leaves[num_leaves:]
        out = jax.core.eval_jaxpr(jaxpr, consts, *leaves)
        return jtu.tree_unflatten(out_treedef, out)

    structs += [_piece(x, None, rows) for x in consts]
    axes += [None] * len(consts)
    _check_same(call, structs, axes, outputs, plan)
    return call, leaves + consts, axes, outputs, out_structs


def _piece(x: Array, axis: int | None, rows: int | None) -> jax.ShapeDtypeStruct:
    """One row (`rows` is None) or a chunk of `rows` rows of `x`, abstractly."""
    shape = x.shape
    if axis is not None:
        middle = () if rows is None else (rows,)
        shape = (*shape[:axis], *middle, *shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=jax.typeof(x).weak_type)


def _check_same(call, structs, axes, outputs: Outputs, plan: ChunkPlan) -> None:
    """Raise if an output that is to be returned once differs from row to row.

    Its batching rules know that: with another axis in front of whatever is mapped, it
    must come out without one.
    """
    front = [None if axis is None else 0 for axis in axes]
    stacked = [
        x if axis is None else jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
        for x, axis in zip(structs, axes)
    ]
    for slot in outputs.slots(Same):
        only = ft.partial(lambda i, leaves: call(leaves)[1][i], slot.index)
        once = jax.vmap(only, in_axes=(front,), out_axes=None, axis_size=1)
        try:
            jax.eval_shape(once, stacked)
        except ValueError as e:
            if "out_axes" not in str(e):
                raise
            raise ValueError(
                f"`out_axes` says that `{slot.path}` is the same for all rows, but it "
                f"depends on the batch, so there are {plan.n} different ones. Give the "
                "axis along which to put them, or a `reduction` that makes one of "
                "them."
            ) from None
