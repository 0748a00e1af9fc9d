import contextlib
import functools as ft
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.lax as lax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on

from chunked_eqx._cpu_conv import fast_convolutions

from .helpers import assert_same


pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="only the CPU needs another lowering"
)


def _case(
    lhs, rhs, dtype="float32", *, faster=(True, True, True), strides=None, **kwargs
):
    """A convolution: shapes with channels first, and what of it has a faster lowering.

    `faster` is about the convolution and its gradients for `lhs` and `rhs`.
    """
    kwargs = {"window_strides": strides or (1,) * (len(lhs) - 2), **kwargs}
    kwargs.setdefault("padding", "SAME")
    return lhs, rhs, dtype, faster, kwargs


NEVER = (False, False, False)
CASES = {
    "1d": _case((3, 4, 9), (5, 4, 3)),
    "1d, strided, valid": _case((3, 4, 11), (5, 4, 3), strides=(2,), padding="VALID"),
    "2d": _case((3, 2, 8, 7), (4, 2, 3, 3)),
    "2d, valid": _case((3, 2, 8, 7), (4, 2, 3, 2), padding="VALID"),
    "2d, explicit padding": _case((3, 2, 8, 7), (4, 2, 3, 3), padding=((2, 1), (0, 3))),
    "2d, cropped": _case((3, 2, 8, 7), (4, 2, 3, 3), padding=((0, -1), (1, -2))),
    # The fast kernel reads out of bounds there.
    "2d, cropped at the start": _case(
        (3, 2, 8, 7),
        (4, 2, 3, 3),
        padding=((-1, 1), (0, 0)),
        faster=(False, True, False),
    ),
    "2d, padded by more than the kernel": _case(
        (3, 2, 8, 7),
        (4, 2, 1, 1),
        padding=((1, 1), (1, 1)),
        faster=(True, False, True),
    ),
    "2d, pointwise, strided": _case((3, 2, 8, 7), (4, 2, 1, 1), strides=(2, 2)),
    "2d, strided": _case((3, 2, 8, 7), (4, 2, 3, 3), strides=(2, 3)),
    "2d, dilated": _case((3, 2, 8, 9), (4, 2, 3, 3), rhs_dilation=(2, 1)),
    "2d, transposed": _case(
        (3, 2, 4, 5), (4, 2, 3, 3), lhs_dilation=(2, 2), padding=((1, 2), (2, 1))
    ),
    "2d, pointwise": _case((3, 6, 5, 5), (4, 6, 1, 1)),
    "2d, precise": _case((3, 2, 8, 7), (4, 2, 3, 3), precision=lax.Precision.HIGHEST),
    "3d": _case((2, 2, 5, 4, 6), (3, 2, 2, 3, 3)),
    "channels in the middle": _case(
        (8, 2, 3, 7),
        (3, 4, 3, 2),
        dimension_numbers=("HCNW", "HOWI", "CNWH"),
    ),
    "channels last": _case(
        (3, 8, 7, 2), (3, 3, 2, 4), dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
    "bfloat16": _case((3, 2, 8, 7), (4, 2, 3, 3), "bfloat16"),
    "float16": _case((3, 2, 8, 7), (4, 2, 3, 3), "float16"),
    "float16, wide result": _case(
        (3, 2, 8, 7),
        (4, 2, 3, 3),
        "float16",
        preferred_element_type="float32",
        # JAX has no gradient of a convolution of two dtypes.
        faster=(True, None, None),
    ),
    "depthwise": _case(
        (3, 4, 8, 7), (4, 1, 3, 3), feature_group_count=4, faster=(False, False, True)
    ),
    "depthwise, 1d": _case(
        (3, 4, 9), (4, 1, 3), feature_group_count=4, faster=(False, False, True)
    ),
    "depthwise, two each": _case(
        (3, 4, 8, 7), (8, 1, 3, 3), feature_group_count=4, faster=NEVER
    ),
    "grouped": _case((3, 4, 8, 7), (6, 2, 3, 3), feature_group_count=2, faster=NEVER),
    "grouped, 3d": _case(
        (2, 4, 4, 4, 4), (2, 2, 3, 3, 3), feature_group_count=2, faster=NEVER
    ),
    "batch groups": _case(
        (4, 2, 8, 7), (6, 2, 3, 3), batch_group_count=2, faster=NEVER
    ),
    "float64": _case((3, 2, 8, 7), (4, 2, 3, 3), "float64", faster=NEVER),
    "complex64": _case((3, 2, 8, 7), (4, 2, 3, 3), "complex64", faster=NEVER),
    "int32": _case((3, 2, 8, 7), (4, 2, 3, 3), "int32", faster=(False, None, None)),
}
# Half the time of a test is LLVM's.
QUICKLY = {"xla_backend_optimization_level": 0}
TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request):
    """The options of a convolution, its arguments, and what of it is lowered faster."""
    *shapes, dtype, faster, kwargs = request.param
    rng = np.random.default_rng(0)
    with _x64(dtype == "float64"):
        # Arrays of numpy: nothing has to be compiled to make them.
        lhs, rhs = (
            (4 * rng.normal(size=shape)).astype(jnp.dtype(dtype)) for shape in shapes
        )
        yield kwargs, lhs, rhs, faster


@contextlib.contextmanager
def _x64(on):
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", on)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _marked(fun):
    def marked(*args):
        with fast_convolutions():
            return fun(*args)

    return marked


def _convolutions(fun, *args):
    """How many convolutions `fun` is lowered to, and how many with channels last."""
    text = jax.jit(fun).lower(*args).as_text()
    dimensions = re.findall(r"dim_numbers = (\S.*?), window", text)
    assert len(dimensions) == text.count("stablehlo.convolution")
    last = r"\[b, (.*, )?f\]x\[(.*, )?i, o\]->\[b, (.*, )?f\]"
    return len(dimensions), sum(bool(re.fullmatch(last, x)) for x in dimensions)


def test_values_and_derivatives(case):
    kwargs, lhs, rhs, (_, is_differentiable, _) = case
    if kwargs["padding"] == ((-1, 1), (0, 0)):
        pytest.skip("Wrong without us, too, other than in a loop.")

    def everything(x, w, dx, dw):
        conv = ft.partial(lax.conv_general_dilated, **kwargs)
        xs, ws = jnp.stack([x, x[::-1]]), jnp.stack([w, w[::-1]])
        out = [jax.vmap(conv, in_axes=(None, 0))(x, ws), jax.vmap(conv)(xs, ws)]
        if is_differentiable is None:
            return out

        def energy(x, w):
            out = conv(x, w)
            return jnp.sum(jnp.tanh(out / 16)).real, out

        # The convolution and its derivative, a gradient and its derivative.
        gradient = jax.grad(energy, (0, 1), has_aux=True)
        return [out, jax.jvp(gradient, (x, w), (dx, dw))]

    args = lhs, rhs, *(x[::-1] for x in (lhs, rhs))
    got = jax.jit(_marked(everything), compiler_options=QUICKLY)(*args)
    kept = jax.eval_shape(everything, *args)
    # No convolution in double precision has a fast kernel, in whatever layout: a kernel
    # that is wrong (there are some) would be wrong in the same layout unmarked, too.
    kwargs = {k: v for k, v in kwargs.items() if k != "preferred_element_type"}
    with _x64(True):
        wide = np.int64 if lhs.dtype == jnp.int32 else np.float64
        wide = np.complex128 if np.iscomplexobj(lhs) else wide
        exact = jax.jit(everything, compiler_options=QUICKLY)
        expected = exact(*(x.astype(wide) for x in args))
    tolerance = TOLERANCE.get(lhs.dtype.name, 2e-5)
    for x, y, z in zip(*map(jax.tree.leaves, (got, expected, kept)), strict=True):
        assert x.dtype == z.dtype
        scale = np.max(np.abs(y))
        assert scale > 0
        x = np.asarray(x).astype(wide)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)


def test_cropped_at_the_start_in_a_loop():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 4, 8, 7)).astype("f4")
    w = rng.normal(size=(4, 4, 3, 3)).astype("f4")
    conv = ft.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding=((-1, 1), (0, 0))
    )
    got = jax.jit(_marked(lambda x, w: lax.map(lambda x: conv(x, w), x)))(x, w)
    # Crop by hand what the padding crops.
    by_hand = ft.partial(conv, padding=((0, 1), (0, 0)))
    expected = jax.jit(jax.vmap(by_hand, (0, None)))(x[:, :, :, 1:], w)
    assert_same(got, expected, atol=1e-4)


def test_lowering(case):
    kwargs, lhs, rhs, faster = case
    conv = ft.partial(lax.conv_general_dilated, **kwargs)

    def for_lhs(out, rhs):
        return jax.linear_transpose(lambda x: conv(x, rhs), lhs)(out)

    def for_rhs(out, lhs):
        return jax.linear_transpose(lambda w: conv(lhs, w), rhs)(out)

    out = jax.eval_shape(conv, lhs, rhs)
    calls = (conv, lhs, rhs), (for_lhs, out, rhs), (for_rhs, out, lhs)
    for (fun, *args), is_faster in zip(calls, faster):
        if is_faster is not None:
            total, already = _convolutions(fun, *args)
            expected = total if is_faster else already
            assert _convolutions(_marked(fun), *args) == (total, expected)


def _conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME")


def _conv_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return _with_jvp(x, w), _with_jvp(dx, w) + _with_jvp(x, dw)


_with_jvp = jax.custom_jvp(_conv)
_with_jvp.defjvp(_conv_jvp)
_with_vjp = jax.custom_vjp(_conv)
_with_vjp.defvjp(
    lambda x, w: (_conv(x, w), (x, w)),
    lambda saved, out: jax.vjp(_conv, *saved)[1](out),
)


def _loop(x, w, reverse: Callable = _with_vjp, mark=fast_convolutions):
    @jax.jit
    def nested(x):
        return _conv(x, w)

    def row(x):
        x = jax.nn.relu(nested(x[None]))
        x = reverse(_with_jvp(x, w), w)
        return jnp.mean(jnp.where(jnp.mean(x) > 0, nested(x), jnp.square(x)))

    @jax.checkpoint
    def body(start, x):
        return jnp.sum(jax.vmap(row)(lax.dynamic_slice_in_dim(x, start, 4)))

    with mark():
        starts = np.arange(0, 12, 4, dtype=np.int32)
        step = lambda total, start: (total + body(start, x), None)  # noqa: E731
        return lax.scan(step, jnp.zeros(()), starts)[0]


def test_mark_reaches_every_convolution_of_a_loop(getkey):
    x = jax.random.normal(getkey(), (12, 3, 6, 6))
    w = jax.random.normal(getkey(), (3, 3, 3, 3))
    gradient = jax.grad(_loop, (0, 1))

    # There is no forward mode of a `custom_vjp`.
    loop = ft.partial(_loop, reverse=_with_jvp)

    def forward(x, w):
        return jax.jvp(loop, (x, w), (x, w))

    def second(x, w):
        return jax.jvp(jax.grad(loop, (0, 1)), (x, w), (x, w))

    def many(x, w):
        return jax.vmap(gradient, in_axes=(None, 0))(x, jnp.stack([w, w]))

    least = {_loop: 3, forward: 4, gradient: 8, second: 12, many: 8}
    for fun, at_least in least.items():
        text = jax.jit(fun).lower(x, w).as_text()
        lines = [line for line in text.splitlines() if "stablehlo.convolution" in line]
        assert len(lines) >= at_least
        assert all("chunked_eqx_convolution" in line for line in lines)
    # The gradient of one row's kernel is a grouped convolution.
    total, last = _convolutions(gradient, x, w)
    assert last == total - 1
    unmarked = ft.partial(_loop, mark=contextlib.nullcontext)
    assert_same(
        jax.jit(gradient)(x, w), jax.jit(jax.grad(unmarked, (0, 1)))(x, w), atol=1e-5
    )


def test_mark_is_not_lost_or_found_in_caches(getkey):
    x = jax.random.normal(getkey(), (2, 3, 6, 6))
    w = jax.random.normal(getkey(), (3, 3, 3, 3))

    conv = jax.jit(_conv)

    def both_first_plain(x, w):
        return _marked(conv)(conv(x, w), w)

    def both_first_marked(x, w):
        return conv(_marked(conv)(x, w), w)

    for fun in both_first_plain, both_first_marked:
        jax.clear_caches()
        assert _convolutions(fun, x, w) == (2, 1)
    assert _convolutions(conv, x, w) == (1, 0)


def test_can_be_switched_off(monkeypatch):
    x, w = jnp.ones((2, 3, 6, 6)), jnp.ones((3, 3, 3, 3))

    monkeypatch.setenv("CHUNKED_EQX_CPU_CONV", "0")
    assert _convolutions(_marked(_conv), x, w) == (1, 0)
    monkeypatch.setenv("CHUNKED_EQX_CPU_CONV", "1")
    assert _convolutions(_marked(_conv), x, w) == (1, 1)


def test_other_backends_are_left_alone(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert isinstance(fast_convolutions(), contextlib.nullcontext)


def test_compute_on_the_host_is_refused():
    # We would have to ask for the rule that we replaced.
    with fast_convolutions():
        pass
    compute: Any = compute_on

    def on_host(x, w):
        with compute("device_host"):
            return _conv(x, w)

    if "f" in inspect.signature(compute).parameters:  # Since jax 0.12.
        space = jax.memory.Space.Device
        on_host = compute(_conv, compute_type="device_host", out_memory_spaces=space)
    with pytest.raises(NotImplementedError, match="CHUNKED_EQX_CPU_CONV=0"):
        jax.jit(on_host).lower(jnp.ones((2, 3, 6, 6)), jnp.ones((3, 3, 3, 3)))


def _run(script, **env):
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
        timeout=120,
    )


def test_switched_off_from_the_start():
    _run(
        """
        import jax, jax.numpy as jnp
        from chunked_eqx._cpu_conv import fast_convolutions

        def conv(x, w):
            with fast_convolutions():
                return jax.lax.conv(x, w, (1, 1), "SAME")

        x, w = jnp.ones((2, 3, 6, 6)), jnp.ones((3, 3, 3, 3))
        text = jax.jit(conv).lower(x, w).as_text()
        assert "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]" in text
        assert "chunked_eqx" not in text
        """,
        CHUNKED_EQX_CPU_CONV="0",
    )


def test_unmarked_convolutions_are_lowered_as_before():
    # In a process of its own: the rule is replaced once and for all.
    _run(
        r"""
        import functools as ft
        import re
        import jax, jax.export, jax.numpy as jnp
        from chunked_eqx._cpu_conv import fast_convolutions
        from jax.experimental.xla_metadata import set_xla_metadata

        conv = ft.partial(jax.lax.conv, window_strides=(2, 1), padding="SAME")
        conv_wide = ft.partial(conv, preferred_element_type=jnp.float32)

        def with_metadata(x, w):
            with set_xla_metadata(of="the user"):
                return conv(x, w) + 1

        def arguments(dtype):
            return jnp.ones((2, 4, 6, 5), dtype), jnp.ones((4, 4, 3, 3), dtype)

        def energy(x, w):
            return jnp.sum(jnp.sin(conv(x, w))).real

        def depthwise(x, w):
            return jax.lax.conv_general_dilated(
                x, w[:, :1], (1, 1), "SAME", feature_group_count=4
            )

        def texts():
            jax.clear_caches()
            for dtype in jnp.float32, jnp.bfloat16, jnp.complex64, jnp.int32:
                x, w = arguments(dtype)
                funs = [conv, with_metadata, jax.vmap(conv, (None, 0)), depthwise]
                if dtype != jnp.int32:
                    funs += [jax.grad(energy, (0, 1))]
                if dtype == jnp.float32:
                    funs += [jax.hessian(energy)]
                xs, ws = jnp.stack([x, x]), jnp.stack([w, w])
                for fun in funs:
                    args = (x, ws) if fun is funs[2] else (x, w)
                    yield jax.jit(fun).lower(*args).as_text()
            yield jax.jit(conv_wide).lower(*arguments(jnp.bfloat16)).as_text()
            batch = jax.export.symbolic_shape("b, 4, 6, 5")
            for dtype in jnp.float32, jnp.complex64:
                x, w = jax.ShapeDtypeStruct(batch, dtype), arguments(dtype)[1]
                export = jax.export.export(jax.jit(conv), platforms=("cpu", "cuda"))
                text = export(x, w).mlir_module()
                # Where an operation comes from is told in other words.
                yield re.sub(r"(?m)^#loc.*$| loc\(.*?\)(?=$| \{)", "", text)

        before = list(texts())
        with fast_convolutions():
            pass
        after = list(texts())
        assert len(before) == 23, len(before)
        for one, other in zip(before, after, strict=True):
            assert "stablehlo.convolution" in one
            assert one == other, one + other
        x, w = arguments(jnp.float32)
        assert jnp.array_equal(conv(x, w), jax.jit(conv)(x, w))
        with fast_convolutions():
            text = jax.jit(lambda x, w: conv(x, w)).lower(x, w).as_text()
        assert "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]" in text
        """
    )


def test_sharded_types_are_left_alone():
    # Eight devices need a process of their own. In `shard_map` we act.
    _run(
        """
        import jax, jax.numpy as jnp, numpy as np
        from chunked_eqx._cpu_conv import fast_convolutions
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

        LAST = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
        shard_map = getattr(jax, "shard_map", None)
        if shard_map is None:
            from jax.experimental.shard_map import shard_map

        def conv(x, w):
            with fast_convolutions():
                return jax.lax.conv(x, w, (1, 1), "SAME")

        x, w = np.ones((8, 3, 6, 6), "f4"), np.ones((3, 3, 3, 3), "f4")
        expected = jax.lax.conv(x, w, (1, 1), "SAME")
        for kind in AxisType.Explicit, AxisType.Auto:
            mesh = jax.make_mesh((8,), ("i",), axis_types=(kind,))
            use = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
            with use(mesh):
                xs = jax.device_put(x, NamedSharding(mesh, P("i")))
                ws = jax.device_put(w, NamedSharding(mesh, P()))
                each = shard_map(
                    conv, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i")
                )
                whole = jax.jit(conv)
                assert (LAST in whole.lower(xs, ws).as_text()) == (
                    kind == AxisType.Auto
                )
                assert LAST in jax.jit(each).lower(xs, ws).as_text()
                for fun in whole, jax.jit(each):
                    out = fun(xs, ws)
                    assert out.sharding.spec[0] == "i", out.sharding
                    np.testing.assert_allclose(out, expected, rtol=1e-5)
                text = whole.lower(xs, ws).compile().as_text()
                assert "all-gather" not in text
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
