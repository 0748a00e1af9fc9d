"""The contract: one table of functions, under every transform and chunk size."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest

import chunked_eqx as ceqx

from .helpers import assert_same, loss, tangents_of


N = 14
# None, 1, a divisor, one that makes the first two chunks overlap, and around n.
CHUNK_SIZES = [None, 1, 7, 5, N - 1, N, N + 1]
SIZES = [
    pytest.param(c, marks=() if c in (1, 5) else pytest.mark.slow) for c in CHUNK_SIZES
]


@dataclasses.dataclass
class Case:
    fun: Callable[..., Any]
    args: tuple
    in_axes: Any = eqx.if_array(0)
    out_axes: Any = eqx.if_array(0)
    kwargs: dict = dataclasses.field(default_factory=dict)
    # What is compared in bfloat16 cannot be compared to 1e-5.
    rtol: float = 2e-5
    atol: float = 2e-5

    def chunked(self, chunk_size):
        return ceqx.filter_vmap(
            self.fun,
            chunk_size=chunk_size,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
        )

    def plain(self, fun, args, kwargs):
        """The oracle. `eqx.filter_vmap` takes no keyword arguments."""
        names = list(kwargs)
        given = args + tuple(kwargs.values())

        def positional(fun, *given):
            rest = given[len(args) :]
            return fun(*given[: len(args)], **dict(zip(names, rest, strict=True)))

        in_axes = self.in_axes
        if isinstance(in_axes, dict):
            default = eqx.if_array(0)
            in_axes = tuple(in_axes.get(name, default) for name in ("x", "y", *names))
        elif not isinstance(in_axes, tuple):
            in_axes = (in_axes,) * len(given)
        else:
            in_axes += (eqx.if_array(0),) * len(names)
        return eqx.filter_vmap(
            positional, in_axes=(None, *in_axes), out_axes=self.out_axes
        )(fun, *given)


def _normal(*shape, seed=0, dtype=jnp.float32):
    return jr.normal(jr.key(seed), shape, dtype)


class _ConvNet(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    head: eqx.nn.Linear

    def __init__(self):
        k1, k2 = jr.split(jr.key(1))
        self.conv = eqx.nn.Conv2d(2, 4, 3, key=k1)
        self.norm = eqx.nn.GroupNorm(2, 4)
        self.head = eqx.nn.Linear(4, 3, key=k2)

    def __call__(self, x):
        return self.head(jnp.tanh(self.norm(self.conv(x))).mean((1, 2)))


class _GRU(eqx.Module):
    cell: eqx.nn.GRUCell

    def __call__(self, xs):
        step = lambda h, x: (self.cell(x, h), h[0])
        return lax.scan(step, jnp.zeros(4), xs)


def _control_flow(x):
    y = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]
    return lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), lax.stop_gradient(y)


def _static_in_and_out(x, scale, name, flag):
    assert name == "a"
    return {"y": x * scale, "name": name, "flag": flag, "act": jnp.sin, "none": None}


def _many_axes(tree, y):
    a, b = tree["a"], tree["b"][0]
    return a[:, None] * b[None, :], (a.sum(), y.sum()), y.T


def _integers(x, i, mask):
    return jnp.where(mask, x[i], 0), i + 1, ~mask


@jax.custom_vjp
def _custom(x):
    return jnp.sin(x)


_custom.defvjp(lambda x: (_custom(x), x), lambda x, g: (3 * g * jnp.cos(x),))


@jax.custom_jvp
def _custom_forward(x):
    return jnp.sin(x)


_custom_forward.defjvp(lambda p, t: (_custom_forward(*p), 5 * t[0] * jnp.cos(*p)))


def _cases() -> dict[str, Case]:
    mlp = eqx.nn.MLP(3, 2, 8, 2, key=jr.key(0))
    bf16 = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, mlp
    )
    ensemble = eqx.filter_vmap(lambda k: eqx.nn.MLP(3, 2, 8, 1, key=k))(
        jr.split(jr.key(3), N)
    )
    attention = eqx.nn.MultiheadAttention(2, 4, key=jr.key(4))
    offset = jnp.arange(3.0)
    x = _normal(N, 3)
    return {
        "mlp": Case(mlp, (x,)),
        "mlp bfloat16": Case(bf16, (x.astype(jnp.bfloat16),), rtol=2e-2, atol=2e-2),
        "conv net": Case(_ConvNet(), (_normal(N, 2, 6, 6),)),
        "gru": Case(_GRU(eqx.nn.GRUCell(3, 4, key=jr.key(2))), (_normal(N, 5, 3),)),
        "attention": Case(
            lambda m, x: m(x, x, x), (attention, _normal(N, 6, 4)), in_axes=(None, 0)
        ),
        "control flow": Case(_control_flow, (x,)),
        "closure": Case(lambda x: x * offset + 1, (x,)),
        "custom_jvp": Case(_custom_forward, (x,)),
        "static leaves": Case(
            _static_in_and_out,
            (x, 2.0, "a", True),
            in_axes=(0, None, None, eqx.if_array(0)),
        ),
        "nested axes": Case(
            _many_axes,
            ({"a": _normal(3, N), "b": (_normal(2, N, seed=1), "s")}, _normal(4, 2)),
            in_axes=({"a": -1, "b": (1, None)}, None),
            out_axes=(1, (0, None), None),
        ),
        "empty outputs": Case(lambda x: (x[:0], x), (x,), out_axes=(1, 0)),
        "negative out_axes": Case(lambda x: (x, x[0]), (x,), out_axes=(-1, -1)),
        "broadcast output": Case(
            lambda x, y: (y, x * 2), (x, offset), in_axes=(0, None)
        ),
        "keyword arguments": Case(
            lambda x, *, shift, scale: x * scale + shift,
            (x,),
            kwargs={"shift": x[:, 0], "scale": 2.0},
        ),
        "axes by name": Case(
            lambda x, y, z=None: x + y - z,
            (x, offset),
            in_axes={"y": None, "z": 1},
            kwargs={"z": _normal(3, N, seed=5)},
        ),
        "ensemble": Case(
            lambda model, x: model(x),
            (ensemble, _normal(3)),
            in_axes=(eqx.if_array(0), None),
        ),
        "ints and bools": Case(
            _integers, (x, jnp.arange(N) % 3, jnp.arange(N) % 2 == 0)
        ),
        "complex": Case(
            lambda x: (jnp.exp(1j * x), jnp.abs(x)), (x.astype(jnp.complex64),)
        ),
        "keys": Case(
            lambda k: (jr.normal(k, (2,)), jr.fold_in(k, 1)), (jr.split(jr.key(0), N),)
        ),
    }


CASES = _cases()
if tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11):
    # Its derivatives crash the process there; not yet understood.
    del CASES["complex"]
# Forward mode is not defined for it.
REVERSE_ONLY = {"custom_vjp": Case(_custom, (_normal(N, 3),))}


def _filter_jit(jit):
    return eqx.filter_jit if jit else lambda f: f


@ft.cache
def _expected(name, what):
    case = {**CASES, **REVERSE_ONLY}[name]
    plain = eqx.filter_jit(case.plain)
    inputs = (case.fun, case.args, case.kwargs)
    if what == "values":
        return plain(*inputs)
    if what == "gradient":
        return eqx.filter_value_and_grad(lambda i: loss(plain(*i)))(inputs)
    return _jvp(lambda i: plain(*i), inputs)


def _jvp(fun, inputs):
    arrays = lambda inputs: eqx.filter(fun(inputs), eqx.is_array)
    out, tangents = eqx.filter_jvp(arrays, (inputs,), (tangents_of(inputs),))
    # `None` says that a tangent is known to be zero, which is as good as a zero.
    zero_or = lambda x, t: jnp.zeros_like(x) if t is None else t
    return out, jax.tree.map(
        lambda x, t: zero_or(x, t) if eqx.is_inexact_array(x) else None,
        out,
        tangents,
        is_leaf=lambda x: x is None,
    )


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("chunk_size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_values(name, chunk_size, jit):
    case = CASES[name]
    chunked = _filter_jit(jit)(case.chunked(chunk_size))
    got = chunked(*case.args, **case.kwargs)
    assert_same(got, _expected(name, "values"), case.rtol, case.atol)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("chunk_size", SIZES)
@pytest.mark.parametrize("name", [*CASES, *REVERSE_ONLY])
def test_gradient(name, chunk_size, jit):
    case = {**CASES, **REVERSE_ONLY}[name]

    @_filter_jit(jit)
    @eqx.filter_value_and_grad
    def value_and_grad(inputs):
        fun, args, kwargs = inputs
        case_ = dataclasses.replace(case, fun=fun)
        return loss(case_.chunked(chunk_size)(*args, **kwargs))

    got = value_and_grad((case.fun, case.args, case.kwargs))
    assert_same(got, _expected(name, "gradient"), case.rtol, case.atol)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("chunk_size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_jvp(name, chunk_size, jit):
    case = CASES[name]

    def chunked(inputs):
        fun, args, kwargs = inputs
        return dataclasses.replace(case, fun=fun).chunked(chunk_size)(*args, **kwargs)

    jvp = _filter_jit(jit)(ft.partial(_jvp, chunked))
    got = jvp((case.fun, case.args, case.kwargs))
    assert_same(got, _expected(name, "jvp"), case.rtol, case.atol)


@pytest.mark.parametrize("name", CASES)
def test_no_tracer_leaks(name):
    case = CASES[name]
    with jax.checking_leaks():
        got = eqx.filter_jit(case.chunked(5))(*case.args, **case.kwargs)

        @eqx.filter_jit
        @eqx.filter_grad
        def grad(inputs):
            args, kwargs = inputs
            zero = 0 * loss((args, kwargs))

            is_module = isinstance(case.fun, eqx.Module)

            @(lambda f: f if is_module else ft.wraps(case.fun)(f))
            def fun(*args, **kwargs):  # Closes over a tracer.
                out = case.fun(*args, **kwargs)
                add = lambda y: (
                    y + zero.astype(y.dtype) if eqx.is_inexact_array(y) else y
                )
                return jax.tree.map(add, out)

            chunked = dataclasses.replace(case, fun=fun).chunked(5)
            return loss(chunked(*args, **kwargs))

        grad((case.args, case.kwargs))
    assert_same(got, _expected(name, "values"), case.rtol, case.atol)


MLP = CASES["mlp"].fun
X = CASES["mlp"].args[0]
COMPOSITIONS = {
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](f(x)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x + 1])),
    "vmap of grad": lambda f: (
        lambda x: jax.vmap(jax.grad(lambda y: loss(f(y))))(jnp.stack([x, x + 1]))
    ),
    "grad of vmap": lambda f: (
        lambda x: jax.grad(lambda y: loss(jax.vmap(f)(y)))(jnp.stack([x, x + 1]))
    ),
    "checkpoint": lambda f: jax.grad(lambda x: loss(jax.checkpoint(lambda x: f(x))(x))),
    "scan": lambda f: (
        lambda x: lax.scan(
            lambda c, _: (c + jnp.tile(f(c)[:, :1], 3), None), x, length=3
        )[0]
    ),
    "grad of jit": lambda f: jax.grad(jax.jit(lambda x: loss(f(x)))),
}


@pytest.mark.parametrize("chunk_size", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_composes(name, chunk_size):
    transform = COMPOSITIONS[name]
    got = jax.jit(transform(ceqx.Chunked(MLP, chunk_size)))(X)
    expected = jax.jit(transform(jax.vmap(MLP)))(X)
    assert_same(got, expected, atol=2e-5)


def test_linear_transpose():
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 9):
        pytest.skip("JAX could not transpose it before 0.9.")
    linear = eqx.nn.Linear(3, 2, use_bias=False, key=jr.key(0))
    y = jnp.ones((N, 2))
    got = jax.linear_transpose(ceqx.Chunked(linear, 5), X)(y)
    assert_same(got, jax.linear_transpose(jax.vmap(linear), X)(y))


def test_chunked_in_chunked():
    points = _normal(N, 6, 3)
    nested = ceqx.Chunked(ceqx.Chunked(MLP, 4), 5)
    plain = jax.vmap(jax.vmap(MLP))
    assert_same(nested(points), plain(points))
    assert_same(
        jax.grad(lambda x: loss(nested(x)))(points),
        jax.grad(lambda x: loss(plain(x)))(points),
        atol=2e-5,
    )


@pytest.mark.parametrize("chunk_size", [None, 1, 5])
@pytest.mark.parametrize("name", ["mlp", "conv net", "ints and bools"])
def test_empty_batch(name, chunk_size):
    case = CASES[name]
    args = jax.tree.map(lambda x: x[:0], case.args)
    chunked = case.chunked(chunk_size)
    assert_same(chunked(*args), case.plain(case.fun, args, {}))
    inputs = (case.fun, args)
    assert_same(
        eqx.filter_grad(
            lambda i: loss(
                dataclasses.replace(case, fun=i[0]).chunked(chunk_size)(*i[1])
            )
        )(inputs),
        eqx.filter_grad(lambda i: loss(case.plain(i[0], i[1], {})))(inputs),
    )


def test_weak_type_does_not_depend_on_the_chunk_size():
    for chunk_size in CHUNK_SIZES:
        f = ceqx.filter_vmap(
            lambda x: jnp.where(x[0] > 0, 1.0, 0.0), chunk_size=chunk_size
        )
        assert not jax.typeof(f(X)).weak_type


def test_ragged_batch_has_no_nans():
    # Rows that are invented, or zeros, would divide by zero.
    with jax.debug_nans(True):
        x = 1 + jnp.arange(14.0)
        f = ceqx.filter_vmap(lambda x: jnp.log(x) / x, chunk_size=5)
        value, grad = jax.value_and_grad(lambda x: f(x).sum())(x)
    assert_same(grad, (1 - jnp.log(x)) / x**2)
    assert_same(value, jnp.sum(jnp.log(x) / x))
