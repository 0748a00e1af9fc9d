import dataclasses
import operator
from typing import Any


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """How `n` rows are cut into chunks: integers only.

    ```
    chunk i, i > 0, holds the rows  i * rows - overlap, ..., (i + 1) * rows - overlap
    chunk 0 holds the rows          0, ..., rows
    ```

    Every chunk has the same number of rows, so that one program serves them all. When
    `chunks` does not divide `n`, the first two chunks share `overlap` rows.

    **Arguments:**

    - `n`: number of rows in the batch.
    - `chunks`: number of chunks; 1 means that the batch is evaluated at once.
    - `rows`: rows in each chunk.

    !!! example

        ```python
        >>> import chunked_eqx as ceqx
        >>> ceqx.ChunkPlan.make(1000, chunk_size=256)
        ChunkPlan(n=1000, chunks=4, rows=250)
        >>> ceqx.ChunkPlan.make(8191, chunk_size=256).overlap
        1

        ```
    """

    n: int
    chunks: int
    rows: int

    @property
    def overlap(self) -> int:
        """Rows that are evaluated twice; always fewer than `chunks` and `rows`."""
        return self.chunks * self.rows - self.n

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each chunk."""
        return (0, *(i * self.rows - self.overlap for i in range(1, self.chunks)))

    @staticmethod
    def make(
        n: int, chunk_size: int | None = None, num_chunks: int | None = None
    ) -> "ChunkPlan":
        """Plan `n` rows for at most `chunk_size` rows a chunk, or `num_chunks` chunks.

        **Arguments:**

        - `n`: number of rows, at least 0.
        - `chunk_size`: the most rows that a chunk may hold.
        - `num_chunks`: the most chunks there may be; exclusive with `chunk_size`.

        With neither, or when one chunk holds the whole batch, the plan has one chunk.

        **Returns:**

        A `ChunkPlan`. With `chunk_size` a number of chunks that divides `n` is
        preferred, if there is one below twice the least number of chunks: then no row
        is evaluated twice and no output needs a copy.

        **Raises:**

        `TypeError` or `ValueError` for anything but a positive integer or `None`.
        """
        chunk_size, num_chunks = check_sizes(chunk_size, num_chunks)
        if num_chunks is not None:
            rows = _ceil_div(n, num_chunks)
            chunks = _ceil_div(n, rows) if n else 1
        elif chunk_size is None or n <= chunk_size:
            rows, chunks = n, 1
        else:
            least = _ceil_div(n, chunk_size)
            divisors = (k for k in range(least, 2 * least) if n % k == 0)
            chunks = next(divisors, least)
            rows = _ceil_div(n, chunks)
        return ChunkPlan(n, chunks, rows)


def check_sizes(chunk_size: Any, num_chunks: Any) -> tuple[int | None, int | None]:
    """Return both as Python integers or `None`, or raise the error a user reads."""
    chunk_size = _check_size("chunk_size", chunk_size)
    num_chunks = _check_size("num_chunks", num_chunks)
    if chunk_size is not None and num_chunks is not None:
        raise ValueError(
            f"Expected `chunk_size` or `num_chunks`, got both (chunk_size={chunk_size},"
            f" num_chunks={num_chunks}). Leave one of them out."
        )
    return chunk_size, num_chunks


def _check_size(name: str, size: Any) -> int | None:
    if size is None:
        return None
    message = (
        f"`{name}` must be a positive integer or None, got {size!r}. None evaluates "
        "the whole batch at once."
    )
    # `True` is an integer for Python, and never what was meant here.
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(message)
    try:
        size = operator.index(size)
    except TypeError:
        raise TypeError(message) from None
    if size < 1:
        raise ValueError(message)
    return size


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
