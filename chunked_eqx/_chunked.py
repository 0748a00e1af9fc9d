from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from ._axes import AxisSpec, batch_size, resolve_in_axes
from ._evaluate import compiled, evaluate, make_options, Options


class Chunked(eqx.Module):
    """A module on a whole batch, evaluated and differentiated chunk by chunk.

    ```
    Chunked(module, chunk_size)(x, key=key)
        == jax.vmap(module)(x, key=jax.random.split(key, len(x)))
    ```

    for every chunk size, in values, dtypes, random draws and derivatives. Memory for
    what happens inside the module does not grow with the batch, neither forward nor
    backward. `Chunked` has no arrays of its own: it is serialised, filtered, updated
    by optax and put into inference mode like the module that it holds.

    Beyond what [`filter_vmap`][] does:

    1. A single PRNG key given as `key=` is split into one for each row, exactly as
       above; keys that have the batch axis already are used as they are. So draws do
       not depend on the chunk size.
    2. An `equinox.nn.State` among the arguments is broadcast, and comes back once.
    3. A call compiles itself if nobody else does: a second call with the same shapes
       neither traces nor compiles.

    In memory are the batch, the outputs and what one chunk needs; so it is in the
    backward pass, which computes each chunk again (`remat`).

    **Arguments:**

    - `module`: any callable pytree, most often an Equinox module, that takes one row;
        or many rows with `batched=True`.
    - `chunk_size`: the most rows to evaluate together. `None`: all, which is the plain
        program.
    - `batched`: whether `module` takes a batch, whose rows it treats independently, as
        for [`filter_chunk`][]. It is then given one key for each row, too.
    - `in_axes`, `out_axes`, `axis_name`, `collectives`, `remat`, `accumulate_dtype`,
        `spmd_axis_name`: as for [`filter_vmap`][].

    **Raises:**

    `TypeError` or `ValueError`, as for [`filter_vmap`][].

    !!! example

        ```python
        >>> import equinox as eqx, jax.numpy as jnp, jax.random as jr
        >>> import chunked_eqx as ceqx
        >>> mlp = eqx.nn.MLP(2, 1, 64, 2, key=jr.key(0))
        >>> model = ceqx.Chunked(mlp, chunk_size=256)
        >>> model(jnp.ones((10_000, 2))).shape
        (10000, 1)
        >>> @eqx.filter_jit
        ... @eqx.filter_grad
        ... def grad(model, x, y):
        ...     return jnp.mean((model(x) - y) ** 2)
        >>> grads = grad(model, jnp.ones((10_000, 2)), jnp.zeros((10_000, 1)))
        >>> grads.module.layers[0].weight.shape
        (64, 2)

        ```
    """

    module: Callable[..., Any]
    chunk_size: int | None = eqx.field(static=True)
    batched: bool = eqx.field(static=True)
    _options: Options = eqx.field(static=True, repr=False)

    def __init__(
        self,
        module: Callable[..., Any],
        chunk_size: int | None,
        *,
        batched: bool = False,
        in_axes: PyTree[AxisSpec] = eqx.if_array(0),
        out_axes: PyTree[AxisSpec] = eqx.if_array(0),
        axis_name: Any = None,
        collectives: str = "batch",
        remat: bool | Callable[..., Any] = True,
        accumulate_dtype: DTypeLike = jnp.float32,
        spmd_axis_name: Any = None,
    ):
        if not callable(module):
            raise TypeError(f"`module` must be callable, got {module!r}.")
        self.module = module
        self.batched = batched
        self._options = make_options(
            per_row=not batched,
            chunk_size=chunk_size,
            in_axes=in_axes,
            out_axes=out_axes,
            axis_name=axis_name,
            collectives=collectives,
            remat=remat,
            accumulate_dtype=accumulate_dtype,
            spmd_axis_name=spmd_axis_name,
            is_broadcast=_is_state,
        )
        self.chunk_size = self._options.chunk_size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the module on the whole batch.

        **Arguments:**

        - `*args`, `**kwargs`: what the module takes, with a batch axis.
        - `key`: a PRNG key, typed or raw, to be split into one for each row; or an
            array of as many keys as there are rows.

        **Returns:**

        What the module returns, with a batch axis.
        """
        return _call(self.module, self._options, args, kwargs)


def _is_state(x: Any) -> bool:
    return isinstance(x, eqx.nn.State)


@compiled
def _call(module, options, args, kwargs):
    return evaluate(module, options, args, _split_key(module, options, args, kwargs))


def _split_key(module, options, args, kwargs):
    key = kwargs.get("key")
    in_axes = options.in_axes.tree
    # A user who gives the axis of `key` gets that.
    is_explicit = isinstance(in_axes, dict) and "key" in in_axes
    if is_explicit or not eqx.is_array(key) or key.ndim != _single_key_ndim(key):
        return kwargs
    others = {name: value for name, value in kwargs.items() if name != "key"}
    axes = resolve_in_axes(module, in_axes, args, others, options.is_broadcast)
    n = batch_size(axes, args, others, None)
    return {**kwargs, "key": jr.split(key, n)}


def _single_key_ndim(key: Array) -> int:
    return 0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 1
