"""Bad input: the error names the argument or the leaf, its shape, and the remedy."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import chunked_eqx as ceqx


X = jnp.ones((12, 3))


def _raises(kind, match, fun, *args, chunk_size=4, wrap=ceqx.filter_vmap, **options):
    kwargs = options.pop("kwargs", {})
    # The same error whether or not there is anything to chunk.
    for size in (chunk_size, None):
        with pytest.raises(kind, match=match) as info:
            wrap(fun, chunk_size=size, **options)(*args, **kwargs)
        assert "jax._src" not in str(info.value)


@pytest.mark.parametrize("other", [1, 2, 3, 4, 6, 8, 11, 13, 24])
def test_unequal_lengths(other):
    # Also where the lengths divide each other, or the chunk.
    match = (
        r"(?s)same number of rows.*`args\[0\]` has 12 rows \(axis 0 of "
        rf"float32\[12,3\]\).*`args\[1\]\['y'\]` has {other} rows \(axis 1 of "
    )
    _raises(
        ValueError,
        match,
        lambda x, t: x,
        X,
        {"y": jnp.ones((3, other))},
        in_axes=(0, 1),
    )


def test_unequal_lengths_of_keyword_arguments():
    _raises(
        ValueError,
        r"`kwargs\['y'\]` has 5 rows",
        lambda x, y: x,
        X,
        kwargs={"y": jnp.ones(5)},
    )


def test_scalar_to_be_mapped():
    match = r"map `args\[1\]` along axis 0, but it is a scalar \(float32\[\]\)"
    _raises(ValueError, match, lambda x, y: x, X, jnp.ones(()))


def test_static_leaf_to_be_mapped():
    match = r"map `args\[1\]\[0\]` along axis 0, but it is 2.0 and not an array"
    _raises(TypeError, match, lambda x, y: x, X, [2.0], in_axes=(0, 0))


@pytest.mark.parametrize("axis", [2, -3, 7])
def test_axis_out_of_range(axis):
    match = rf"along axis {axis}, which is out of range for its shape \(12, 3\)"
    _raises(ValueError, match, lambda x: x, X, in_axes=axis)


@pytest.mark.parametrize("bad", ["0", 1.0, True, jnp.sum])
def test_in_axes_of_another_kind(bad):
    _raises(
        TypeError,
        "`in_axes` must consist of None, integers",
        lambda x: x,
        X,
        in_axes=bad,
    )


def test_in_axes_that_are_no_prefix():
    _raises(
        ValueError,
        "`in_axes` must have the structure",
        lambda x: x["a"],
        {"a": X},
        in_axes=({"b": 0},),
    )


def test_in_axes_of_another_number_of_arguments():
    _raises(
        ValueError,
        "`in_axes` has 2 entries for 1 positional",
        lambda x: x,
        X,
        in_axes=(0, None),
    )


def test_in_axes_of_unknown_name():
    _raises(
        ValueError,
        "`in_axes` names 'z', to which no argument",
        lambda x: x,
        X,
        in_axes={"z": None},
    )


@pytest.mark.parametrize("args", [(), (2.0,), (jnp.ones(3),)])
def test_nothing_mapped(args):
    _raises(
        ValueError,
        "Cannot tell the batch size: no argument is mapped",
        lambda *args: 0,
        *args,
        in_axes=None,
    )


def test_axis_size_of_another_length():
    _raises(
        ValueError,
        r"`axis_size` is 5, but `args\[0\]` has 12 rows",
        lambda x: x,
        X,
        axis_size=5,
    )


@pytest.mark.parametrize("wrap", [ceqx.filter_vmap, ceqx.filter_chunk])
def test_batched_output_where_out_axes_says_none(wrap):
    match = r"`out_axes` says that `output\[1\]\['a'\]` is the same for all rows"
    _raises(
        ValueError,
        match,
        lambda x: (x, {"a": x.sum()}),
        X,
        out_axes=(0, None),
        wrap=wrap,
    )


def test_out_axis_out_of_range():
    match = r"rows of `output\['a'\]` along axis 2, which is out of range: for one row "
    _raises(ValueError, match, lambda x: {"a": x}, X, out_axes=2)


def test_out_axes_that_are_no_prefix():
    _raises(
        ValueError,
        "`out_axes` must have the structure",
        lambda x: x,
        X,
        out_axes=(0, 0),
    )


def test_static_output_with_an_axis():
    match = r"axis 0 of `output\[1\]`, but it is 'a' and not an array"
    _raises(TypeError, match, lambda x: (x, "a"), X, out_axes=0)


def test_batched_function_that_mixes_rows():
    _raises(
        ValueError,
        r"`output` is a scalar \(float32\[\]\) and has no axis of rows",
        lambda x: x.sum(),
        X,
        wrap=ceqx.filter_chunk,
    )
    _raises(
        ValueError,
        r"`output` along axis 0, but for (4|12) rows of input it is "
        r"float32\[3\]",
        lambda x: x.sum(0),
        X,
        wrap=ceqx.filter_chunk,
    )


def test_reduction_without_batch_axis():
    _raises(
        ValueError,
        "says that it has no batch axis",
        lambda x: x,
        X,
        wrap=ceqx.filter_chunk,
        out_axes=None,
        reduction="sum",
    )


@pytest.mark.parametrize("wrap", [ceqx.filter_vmap, ceqx.filter_chunk, ceqx.Chunked])
@pytest.mark.parametrize("bad", [0, -3, 1.5, True, "8"])
def test_bad_chunk_size(wrap, bad):
    with pytest.raises(
        (TypeError, ValueError), match="`chunk_size` must be a positive"
    ):
        wrap(lambda x: x, chunk_size=bad)


@pytest.mark.parametrize("wrap", [ceqx.filter_vmap, ceqx.filter_chunk])
def test_bad_options(wrap):
    with pytest.raises(ValueError, match="Expected `chunk_size` or `num_chunks`, got"):
        wrap(lambda x: x, chunk_size=2, num_chunks=2)
    with pytest.raises(TypeError, match="`remat` must be True, False or a"):
        wrap(lambda x: x, remat="full")
    with pytest.raises(TypeError, match="`accumulate_dtype` must be a floating dtype"):
        wrap(lambda x: x, accumulate_dtype=jnp.int32)
    with pytest.raises(NotImplementedError, match="`spmd_axis_name`"):
        wrap(lambda x: x, spmd_axis_name="i")
    with pytest.raises(TypeError, match="Expected a function or a callable module"):
        wrap(3, chunk_size=2)


def test_collectives_are_yet_to_come():
    with pytest.raises(NotImplementedError, match="`axis_name`"):
        ceqx.filter_vmap(lambda x: x, axis_name="i")
    with pytest.raises(ValueError, match='`collectives` must be "batch" or "chunk"'):
        ceqx.filter_vmap(lambda x: x, collectives="none")
    with pytest.raises(TypeError, match="`module` must be callable"):
        ceqx.Chunked(jnp.ones(3), 2)  # pyright: ignore[reportArgumentType]


def test_keys_that_do_not_fit():
    dropout = ceqx.Chunked(eqx.nn.Dropout(), 4)
    with pytest.raises(ValueError, match=r"`kwargs\['key'\]` has 5 rows"):
        dropout(X, key=jr.split(jr.key(0), 5))


def test_numpy_arrays_are_arrays():
    x = np.ones((12, 3), np.float32)
    f = ceqx.filter_vmap(lambda x, y: x + y, chunk_size=4)
    assert f(x, jnp.ones((12, 3))).shape == (12, 3)
