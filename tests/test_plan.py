import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import chunked_eqx as ceqx


sizes = st.none() | st.integers(1, 60)


@settings(derandomize=True, max_examples=500, deadline=None)
@given(n=st.integers(0, 50), size=sizes, by_number=st.booleans())
def test_every_row_is_covered_in_order(n, size, by_number):
    option = {"num_chunks" if by_number else "chunk_size": size}
    plan = ceqx.ChunkPlan.make(n, **option)
    assert plan.n == n
    assert plan.chunks == len(plan.starts) >= 1
    assert 0 <= plan.overlap < max(plan.chunks, 1)
    if n:
        assert plan.overlap < plan.rows
    if size is not None:
        assert (plan.chunks if by_number else plan.rows) <= max(size, 0)
    # Once the rows shared by the first two chunks are dropped, each row is there once.
    rows = [range(start, start + plan.rows) for start in plan.starts]
    rows[0] = rows[0][: plan.rows - plan.overlap]
    assert [r for chunk in rows for r in chunk] == list(range(n))


@pytest.mark.parametrize(
    ("n", "chunk_size", "chunks", "rows"),
    [
        (8192, 256, 32, 256),
        (8191, 256, 32, 256),  # A prime: overlap by one row.
        (1003, 64, 17, 59),  # A divisor is near.
        (94, 16, 6, 16),  # None is.
        (0, 4, 1, 0),
        (5, 5, 1, 5),
        (5, None, 1, 5),
        (5, 4, 2, 3),
        (5, np.int64(1), 5, 1),
    ],
)
def test_chunk_size(n, chunk_size, chunks, rows):
    assert ceqx.ChunkPlan.make(n, chunk_size) == ceqx.ChunkPlan(n, chunks, rows)


def test_num_chunks_is_never_exceeded():
    # Five chunks of two would divide the batch, but three were asked for.
    assert ceqx.ChunkPlan.make(10, num_chunks=3) == ceqx.ChunkPlan(10, 3, 4)


@pytest.mark.parametrize("name", ["chunk_size", "num_chunks"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, 2.0, True, "8", (8,), np.ones(2)])
def test_bad_sizes(name, bad):
    with pytest.raises((TypeError, ValueError), match=f"`{name}` must be a positive"):
        ceqx.ChunkPlan.make(10, **{name: bad})


def test_both_sizes():
    with pytest.raises(ValueError, match="Expected `chunk_size` or `num_chunks`, got"):
        ceqx.ChunkPlan.make(10, chunk_size=2, num_chunks=5)
