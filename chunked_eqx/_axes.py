import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from ._reduction import Reduction


AxisSpec = int | None | Callable[[Any], int | None]


def is_none(x: Any) -> bool:
    """`None` is a leaf of the axes, of the reductions, and of nothing else."""
    return x is None


class Frozen:
    """A pytree of hashable leaves, itself hashable: an option that jit can key on."""

    def __init__(self, tree: PyTree[Any]):
        leaves, self._treedef = jtu.tree_flatten(tree, is_leaf=is_none)
        self._leaves = tuple(leaves)

    @property
    def tree(self) -> PyTree[Any]:
        """The pytree that was frozen."""
        return jtu.tree_unflatten(self._treedef, self._leaves)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Frozen)
            and self._treedef == other._treedef
            and self._leaves == other._leaves
        )

    def __hash__(self) -> int:
        return hash((self._treedef, self._leaves))

    def __repr__(self) -> str:
        return repr(self.tree)


# A resolved axis. Not a plain `int | None`, since `None` would vanish from a pytree.
@dataclasses.dataclass(frozen=True)
class _Axis:
    axis: int | None


def never(x: Any) -> bool:
    """False: no node is broadcast of its own accord."""
    del x
    return False


def _resolve(
    name: str, spec: PyTree[Any], tree: PyTree[Any], is_broadcast=never
) -> list[int | None]:
    """The axis of every leaf of `tree`, of which `spec` is a prefix."""

    def resolve_leaf(one: Any, leaf: Any) -> _Axis:
        if is_broadcast(leaf):
            axis = None
        else:
            axis = one(leaf) if callable(one) else one
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
            raise TypeError(
                f"`{name}` must consist of None, integers, and callables that return "
                f"either, got {axis!r}."
            )
        return _Axis(axis)

    def resolve_subtree(one: Any, subtree: Any) -> PyTree[_Axis]:
        axes = jtu.tree_map(
            lambda x: resolve_leaf(one, x), subtree, is_leaf=is_broadcast
        )
        # A broadcast node was one leaf until here; give each of its leaves its axis.
        return jtu.tree_map(lambda a, x: jtu.tree_map(lambda _: a, x), axes, subtree)

    _check_prefix(name, spec, tree)
    axes = jtu.tree_map(resolve_subtree, spec, tree, is_leaf=is_none)
    return [a.axis for a in jtu.tree_leaves(axes)]


def _check_prefix(name: str, spec: PyTree[Any], tree: PyTree[Any]) -> None:
    try:
        jtu.tree_map(lambda *_: None, spec, tree, is_leaf=is_none)
    except ValueError as e:
        raise ValueError(
            f"`{name}` must have the structure of a prefix of what it speaks of, got "
            f"{spec!r} for {jtu.tree_structure(tree)}."
        ) from e


def resolve_in_axes(
    fun: Callable[..., Any],
    in_axes: PyTree[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_broadcast: Callable[[Any], bool] = never,
) -> list[int | None]:
    """The axis of every leaf of `(args, kwargs)`, negative ones counted from the front.

    `in_axes` is a prefix of `args`, or one axis for all arguments, or a dictionary by
    argument name. Keyword arguments that it does not speak of are mapped along axis 0.
    Nodes for which `is_broadcast` holds are broadcast whatever `in_axes` says.
    """
    specs = _specs_per_argument(fun, in_axes, args, kwargs)
    axes = _resolve("in_axes", specs, (args, kwargs), is_broadcast)
    leaves = jtu.tree_leaves_with_path((args, kwargs))
    return [
        None if axis is None else _check_in_axis(axis, leaf, _argument_name(path))
        for axis, (path, leaf) in zip(axes, leaves, strict=True)
    ]


def _specs_per_argument(fun, in_axes, args, kwargs):
    default = eqx.if_array(0)
    if isinstance(in_axes, dict):
        specs = dict(in_axes)
        # `zip` stops at the shorter: arguments with default values may be absent.
        names = [name for name, _ in zip(_parameters(fun), args)]
        args_specs = tuple(specs.pop(name, default) for name in names)
        args_specs += (default,) * (len(args) - len(names))
        kwargs_specs = {name: specs.pop(name, default) for name in kwargs}
        if specs:
            raise ValueError(
                f"`in_axes` names {', '.join(map(repr, specs))}, to which no argument "
                f"of this call corresponds. It was called with {len(args)} positional "
                f"arguments {names} and the keyword arguments {list(kwargs)}; arguments"
                " left at their default values cannot be mapped."
            )
        return args_specs, kwargs_specs
    if isinstance(in_axes, list):  # As `jax.vmap` does.
        in_axes = tuple(in_axes)
    if isinstance(in_axes, tuple):
        if len(in_axes) != len(args):
            raise ValueError(
                f"`in_axes` has {len(in_axes)} entries for {len(args)} positional "
                "arguments. Give one entry for each of them, or a dictionary by "
                "argument name."
            )
        return in_axes, {name: default for name in kwargs}
    return (in_axes,) * len(args), {name: in_axes for name in kwargs}


def _parameters(fun: Callable[..., Any]) -> list[str]:
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # Some builtins have no signature.
        return []
    return [p.name for p in parameters if p.kind in positional]


def _argument_name(path: tuple[Any, ...]) -> str:
    root = "args" if path[0].idx == 0 else "kwargs"
    return root + jtu.keystr(path[1:])


def _check_in_axis(axis: int, leaf: Any, name: str) -> int:
    if not eqx.is_array(leaf):
        raise TypeError(
            f"`in_axes` asks to map `{name}` along axis {axis}, but it is {leaf!r} and "
            "not an array. Use `None` there to broadcast it, or "
            f"`equinox.if_array({axis})` to map only the arrays of an argument."
        )
    if leaf.ndim == 0:
        raise ValueError(
            f"`in_axes` asks to map `{name}` along axis {axis}, but it is a scalar "
            f"({describe(leaf)}) and has no axis of rows. Use `None` there in `in_axes`"
            " to broadcast it."
        )
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(
            f"`in_axes` asks to map `{name}` along axis {axis}, which is out of range "
            f"for its shape {leaf.shape}. Use an axis from {-leaf.ndim} to "
            f"{leaf.ndim - 1}."
        )
    return axis % leaf.ndim


def batch_size(
    axes: Sequence[int | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axis_size: int | None,
) -> int:
    """The number of rows, on which all mapped leaves have to agree."""
    named = jtu.tree_leaves_with_path((args, kwargs))
    mapped = [
        (leaf.shape[axis], _argument_name(path), leaf, axis)
        for axis, (path, leaf) in zip(axes, named, strict=True)
        if axis is not None
    ]
    sizes = {size for size, *_ in mapped}
    if len(sizes) > 1:
        lines = [
            f"  `{name}` has {size} rows (axis {axis} of {describe(leaf)})"
            for size, name, leaf, axis in mapped
        ]
        raise ValueError(
            "All mapped arrays must have the same number of rows, got\n"
            + "\n".join(lines)
            + "\nUse `None` in `in_axes` for what is not part of the batch."
        )
    if not sizes and axis_size is None:
        raise ValueError(
            "Cannot tell the batch size: no argument is mapped. "
            + _summary(named)
            + " Pass arrays, change `in_axes`, or give `axis_size`."
        )
    if sizes and axis_size not in (None, *sizes):
        size, name, leaf, axis = mapped[0]
        raise ValueError(
            f"`axis_size` is {axis_size}, but `{name}` has {size} rows (axis {axis} of "
            f"{describe(leaf)})."
        )
    return sizes.pop() if sizes else axis_size  # pyright: ignore[reportReturnType]


def _summary(named) -> str:
    if not named:
        return "It was called without any array or other leaf."
    return (
        "Broadcast are "
        + ", ".join(
            f"`{_argument_name(path)}` ({describe(leaf)})" for path, leaf in named[:5]
        )
        + (", ..." if len(named) > 5 else ".")
    )


def describe(leaf: Any) -> str:
    """Dtype and shape of an array, as in error messages."""
    if not eqx.is_array(leaf) and not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


@dataclasses.dataclass(frozen=True)
class Kept:
    """An output whose rows are kept, along `axis` of the result."""

    index: int
    axis: int
    path: str


@dataclasses.dataclass(frozen=True)
class Same:
    """An output that is the same for every row, returned once."""

    index: int
    path: str


@dataclasses.dataclass(frozen=True)
class Reduced:
    """A subtree of the output of which only a reduction over the rows is returned.

    `static` is the subtree with `None` in place of its arrays.
    """

    index: int
    rule: Reduction | str
    static: PyTree[Any]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where the outputs of a function go: its output with slots in place of arrays.

    Static leaves stay in the skeleton and come back from there.
    """

    skeleton: PyTree[Any]

    def slots(self, kind: type) -> list[Any]:
        """The slots of one kind, in the order of their index."""
        leaves = jtu.tree_leaves(self.skeleton, is_leaf=_is_slot)
        return [x for x in leaves if isinstance(x, kind)]

    def fill(self, kept: list, same: list, reduced: list) -> PyTree[Any]:
        """The output, from what belongs in the slots."""
        values = {Kept: kept, Same: same, Reduced: reduced}
        return jtu.tree_map(
            lambda x: values[type(x)][x.index] if _is_slot(x) else x,
            self.skeleton,
            is_leaf=_is_slot,
        )


def _is_slot(x: Any) -> bool:
    return isinstance(x, Kept | Same | Reduced)


def split_outputs(
    out: PyTree[Any],
    out_axes: PyTree[Any],
    reduction: PyTree[Any],
    rows: int | None,
    is_broadcast: Callable[[Any], bool] = never,
) -> tuple[list[Array], list[Array], list[PyTree[Array]], Outputs]:
    """Sort the arrays of `out` by what happens to them.

    `rows` is None if `out` is the output for one row, to which the batch axis is yet
    to be added; else the number of rows along the batch axis that it has already.

    Returns the arrays that are kept, the arrays that are the same for all rows, the
    arrays to reduce (for `rows` with their batch axis moved to the front), and the
    `Outputs`.
    """
    _check_prefix("reduction", reduction, out)
    axes = iter(_resolve("out_axes", out_axes, out, is_broadcast))
    kept, same, reduced = [], [], []

    def keep(path, leaf):
        axis, name = next(axes), "output" + jtu.keystr(path)
        if axis is None:
            if not eqx.is_array(leaf):
                return leaf
            same.append(leaf)
            return Same(len(same) - 1, name)
        leaf = _as_array(leaf, name, f"`out_axes` asks for axis {axis} of")
        kept.append(leaf)
        return Kept(len(kept) - 1, _check_out_axis(axis, leaf, name, rows), name)

    def to_reduce(path, leaf):
        axis, name = next(axes), "output" + jtu.keystr(path)
        if not eqx.is_array_like(leaf):
            return leaf
        leaf = _as_array(leaf, name, "`reduction` speaks of")
        if rows is None:
            return leaf
        if axis is None:
            raise ValueError(
                f"`reduction` asks to reduce `{name}` ({describe(leaf)}), but "
                "`out_axes` says that it has no batch axis. Give the axis along which "
                "its rows lie."
            )
        return jnp.moveaxis(leaf, _check_out_axis(axis, leaf, name, rows), 0)

    def reduce(rule, subtree):
        arrays, static = eqx.partition(subtree, eqx.is_array)
        reduced.append(arrays)
        return Reduced(len(reduced) - 1, rule, static)

    def visit(prefix, rule, subtree):
        to_leaf = keep if rule is None else to_reduce
        subtree = jtu.tree_map_with_path(
            lambda path, x: to_leaf(prefix + path, x), subtree
        )
        if rule is None:
            return subtree
        if isinstance(rule, Reduction):
            return reduce(rule, subtree)
        return jtu.tree_map(
            lambda x: reduce(rule, x) if eqx.is_array(x) else x, subtree
        )

    skeleton = jtu.tree_map_with_path(visit, reduction, out, is_leaf=is_none)
    return kept, same, reduced, Outputs(skeleton)


def _as_array(leaf: Any, name: str, request: str) -> Array:
    if not eqx.is_array_like(leaf):
        raise TypeError(
            f"{request} `{name}`, but it is {leaf!r} and not an array. Use `None` "
            "there in `out_axes` to return it once, or `equinox.if_array` to speak of "
            "arrays only."
        )
    return jnp.asarray(leaf)


def _check_out_axis(axis: int, leaf: Array, name: str, rows: int | None) -> int:
    # The output for one row gets one axis more.
    ndim = leaf.ndim + (rows is None)
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"`out_axes` asks for the rows of `{name}` along axis {axis}, which is out "
            f"of range: {'for one row ' if rows is None else ''}it is "
            f"{describe(leaf)}. Use an axis from {-ndim} to {ndim - 1}."
            if ndim
            else f"`{name}` is a scalar ({describe(leaf)}) and has no axis of rows, "
            f"but `out_axes` asks for axis {axis}. The function must treat rows "
            "independently and return one entry for each; use `None` there in "
            "`out_axes` if it does not depend on the rows."
        )
    axis = axis % ndim
    if rows is not None and leaf.shape[axis] != rows:
        raise ValueError(
            f"`out_axes` asks for the rows of `{name}` along axis {axis}, but for "
            f"{rows} rows of input it is {describe(leaf)}. The function must return "
            "one entry for each row; use `None` there in `out_axes` if it does not "
            "depend on the rows."
        )
    return axis
