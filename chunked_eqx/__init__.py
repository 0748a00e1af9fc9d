"""Equinox modules and functions on batches of any size, one chunk at a time."""

from ._chunked import Chunked as Chunked
from ._plan import ChunkPlan as ChunkPlan
from ._reduction import Reduction as Reduction
from ._vmap import filter_chunk as filter_chunk, filter_vmap as filter_vmap


__version__ = "0.1.0"
