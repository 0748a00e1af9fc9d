import contextlib
import functools as ft
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.lax as lax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir


# XLA:CPU brings a convolution into the layout of its fast kernel (channels last) only
# where it stands in the entry computation. Inside a loop it is computed by a scalar
# loop nest instead, 10 to 45 times slower. So convolutions that are traced in our loop
# carry a mark, and are brought into that layout here, when they are lowered: after
# differentiation and vectorisation, whose convolutions inherit the mark, and without
# any change to the user's model.
_MARK = "chunked_eqx_convolution"
_SWITCH = "CHUNKED_EQX_CPU_CONV"


def fast_convolutions() -> AbstractContextManager[Any]:
    """Have the convolutions that are traced in this context run fast in a loop on CPU.

    ```
    with fast_convolutions():
        jax.lax.scan(body, init, xs)  # convolutions in `body`, and in its derivatives
    ```

    It does nothing if the default backend is not the CPU, or if the environment
    variable `CHUNKED_EQX_CPU_CONV` is `0`. Both are looked at on entry, that is when a
    loop is traced; what `jax.jit` has compiled before stays as it is.

    **Returns:**

    A context manager. JAX's lowering rule for convolutions on CPU is replaced when the
    first one is made; convolutions outside such a context are lowered as before.
    """
    if os.environ.get(_SWITCH) == "0" or jax.default_backend() != "cpu":
        return contextlib.nullcontext()
    _register()
    return set_xla_metadata(**{_MARK: "channels_last"})


@ft.cache
def _register() -> None:
    mlir.register_lowering(lax.conv_general_dilated_p, _lower, platform="cpu")


def _lower(ctx: mlir.LoweringRuleContext, lhs, rhs, **params):
    traced = ctx.jaxpr_eqn_ctx
    if traced is not None and traced.compute_type == "device_host":
        # Below we ask for another platform's rule. JAX takes the rule for the CPU here
        # whatever the platform, and we would be called again, without end.
        raise NotImplementedError(
            "A convolution under `compute_on('device_host')` cannot be lowered on the "
            "CPU backend after a chunked loop has been traced. Start with the "
            f"environment variable `{_SWITCH}=0`, or remove `compute_on`."
        )
    marked = traced is not None and _MARK in (traced.xla_metadata or ())
    faster = marked and _is_faster(*ctx.avals_in, *ctx.avals_out, **params)
    fun = ft.partial(_channels_last if faster else _as_it_is, **params)
    # We replaced the rule for "cpu", but JAX registers the very same one for "cuda":
    # lowered for that platform, a convolution gives what it would have given here.
    # (The operation that comes out does not depend on the platform.)
    default = ctx.replace(platforms=("cuda",))
    return mlir.lower_fun(fun, multiple_results=False)(default, lhs, rhs)


def _is_faster(
    lhs,
    rhs,
    out,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    padding: Sequence[tuple[Any, Any]],
    feature_group_count: int,
    batch_group_count: int,
    **params,
) -> bool:
    # Time channels-last over time as it is, in a loop, on jax 0.6, 0.10 and 0.12:
    # 0.02 to 0.9 for plain, strided, dilated and transposed convolutions in one to
    # three dimensions and their derivatives. (About 1 for few channels, and for the
    # kernel's gradient of a transposed one; 2 for that in 3-D with less than 32
    # channels on jax 0.6.) There is no fast kernel for other dtypes (float64: 1 to 4).
    if any(x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) for x in (lhs, rhs)):
        return False
    # Groups are what the fast kernel is slow at: 2 to 20.
    if feature_group_count != 1:
        return False
    # Groups of the batch are the kernel's gradient of a grouped convolution: 1 to 4,
    # but 0.02 to 1 for a depthwise one, where a group is a single channel.
    channels = rhs.shape[dimension_numbers.rhs_spec[0]]
    if batch_group_count != 1 and not (
        batch_group_count == lhs.shape[dimension_numbers.lhs_spec[0]] == channels
    ):
        return False
    # If it crops the start of an axis, then the fast kernel of jax 0.6 and 0.10 reads
    # what is not its own. (Sizes of exported programs may be symbols.)
    if not all(isinstance(low, int | np.integer) and low >= 0 for low, _ in padding):
        return False
    # JAX knows how to shard the convolution that the user wrote, not ours. (In
    # `shard_map` nothing is sharded that we can see.)
    return params.get("out_sharding") is None and all(
        axis is None for x in (lhs, rhs, out) for axis in x.sharding.spec
    )


def _as_it_is(lhs: Array, rhs: Array, **params) -> Array:
    return lax.conv_general_dilated_p.bind(lhs, rhs, **params)


def _channels_last(
    lhs: Array,
    rhs: Array,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    preferred_element_type,
    **params,
) -> Array:
    # Only `lax` here: `jnp.transpose` and the like are jitted functions, and JAX would
    # cache what they are lowered to regardless of the platform.
    batch, features, *space = dimension_numbers.lhs_spec
    lhs = lax.transpose(lhs, (batch, *space, features))
    to, of, *window = dimension_numbers.rhs_spec
    rhs = lax.transpose(rhs, (*window, of, to))
    # The kernel for float16 of jax 0.6 is 30 times slower than that for float32.
    dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
    if lhs.dtype == rhs.dtype == jnp.float16:
        lhs, rhs = (lax.convert_element_type(x, jnp.float32) for x in (lhs, rhs))
        preferred_element_type = jnp.float32

    last, space = lhs.ndim - 1, range(1, lhs.ndim - 1)
    out = _as_it_is(
        lhs,
        rhs,
        dimension_numbers=lax.ConvDimensionNumbers(
            (0, last, *space), (last, last - 1, *range(last - 1)), (0, last, *space)
        ),
        preferred_element_type=preferred_element_type,
        **params,
    )

    batch, features, *space = dimension_numbers.out_spec
    source = (batch, *space, features)
    out = lax.transpose(out, [source.index(axis) for axis in range(out.ndim)])
    return lax.convert_element_type(out, dtype)
