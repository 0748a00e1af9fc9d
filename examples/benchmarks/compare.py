"""Compare ways to evaluate and differentiate a function over a batch in chunks.

Every method gets the same function of one row, batch and chunk size, and computes

- `forward`: the outputs of all rows;
- `gradient`: value and gradient of the mean square of all outputs, with respect to the
  parameters.

Time is the median over rounds, each of which runs every method once, divided by that of
the unchunked program (`jax.vmap`). Memory is what the compiled program allocates for
temporaries. A method is timed only if its results agree with the unchunked program's.

    python examples/benchmarks/compare.py [--workloads mlp1024 gru] [--methods ...]
                                          [--rounds 7] [--out compare] [--quick]

Prints one table of times and one of memory, and writes `compare.png` and
`compare.json`. All workloads together take several minutes on two CPU cores.
"""

import argparse
import dataclasses
import functools as ft
import itertools as it
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import matplotlib
import numpy as np

import chunked_eqx as ceqx


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


# NetKet turns on double precision for the whole process when it is imported, and wraps
# its loops in `shard_map` even on one device, which rejects some row functions.
os.environ["NETKET_ENABLE_X64"] = os.environ["NETKET_SHARDING"] = "0"

MODES = ("forward", "gradient")
BASELINE = "vmap"
# Relative, in single precision, where sums over the batch differ in their order.
TOLERANCE = 1e-3


# --- Workloads: layers, what they do to one row, and how many rows of which shape -----


def call(module, x):
    """Call a module that is a workload by itself."""
    return module(x)


def make_transformer(key):
    """Return the layers of a transformer block of width 64."""
    keys = jr.split(key)
    attention = eqx.nn.MultiheadAttention(4, 64, key=keys[0])
    mlp = eqx.nn.MLP(64, 64, 256, 1, jax.nn.gelu, key=keys[1])
    return attention, mlp, eqx.nn.LayerNorm(64), eqx.nn.LayerNorm(64)


def transformer(layers, x):
    """Apply a pre-norm transformer block to a sequence, (length, width)."""
    attention, mlp, *norms = layers
    h = jax.vmap(norms[0])(x)
    x = x + attention(h, h, h)
    return x + jax.vmap(mlp)(jax.vmap(norms[1])(x))


def make_elementwise(key):
    """Return scale and shift."""
    return tuple(jr.normal(key, (2, 64)))


def elementwise(layers, x):
    """Do a few cheap operations on each element: bound by memory traffic."""
    scale, shift = layers
    return jnp.tanh(scale * x + shift) * x


def sine(x):
    """Activate as sine networks do."""
    return jnp.sin(10 * x)


def gru(cell, x):
    """Return the last state of a GRU on a sequence, (length, width)."""
    start = jnp.zeros(cell.hidden_size)
    return jax.lax.scan(lambda h, x_t: (cell(x_t, h), None), start, x)[0]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A function of layers and one row, how to make both, and batch and chunk size."""

    make: Callable
    apply: Callable
    row_shape: tuple[int, ...]
    n: int
    chunk_size: int

    def build(self, quick: bool) -> tuple[Callable, Any, jax.Array, int]:
        """Return the function of (parameters, row), parameters, batch, chunk size."""
        layers_key, batch_key = jr.split(jr.key(0))
        params, static = eqx.partition(self.make(key=layers_key), eqx.is_array)
        # Four chunks, when quick: enough for the loop to be one.
        chunk_size = min(self.chunk_size, 8) if quick else self.chunk_size
        n = 4 * chunk_size if quick else self.n
        batch = jr.normal(batch_key, (n, *self.row_shape))

        def row(params, x):
            return self.apply(eqx.combine(params, static), x)

        return row, params, batch, chunk_size


WORKLOADS = {
    "mlp1024": Workload(
        ft.partial(eqx.nn.MLP, 64, 10, 1024, 3), call, (64,), 8192, 256
    ),
    "mlp64": Workload(ft.partial(eqx.nn.MLP, 16, 1, 64, 2), call, (16,), 65536, 64),
    "transformer": Workload(make_transformer, transformer, (32, 64), 512, 32),
    "elementwise": Workload(make_elementwise, elementwise, (64,), 131072, 1024),
    "sine": Workload(
        ft.partial(eqx.nn.MLP, 2, 1, 128, 3, sine), call, (2,), 65536, 1024
    ),
    "gru": Workload(ft.partial(eqx.nn.GRUCell, 32, 64), gru, (32, 32), 2048, 64),
}


# --- Methods: from a function of one row to one of a batch, and to its gradient -------


def loss(outputs):
    """Return the mean square of the outputs: its gradient depends on the values."""
    return jnp.mean(jnp.square(outputs))


def through(forward: Callable) -> Callable:
    """Differentiate straight through the batched function, as a training step does."""

    def gradient(row, chunk_size):
        batched = forward(row, chunk_size)
        return jax.value_and_grad(lambda params, xs: loss(batched(params, xs)))

    return gradient


def vmap(row, chunk_size):
    """All rows at once."""
    return jax.vmap(row, in_axes=(None, 0))


def chunked(row, chunk_size):
    """The wrapper of this library, around the row function with its parameters."""
    return lambda params, xs: ceqx.Chunked(jtu.Partial(row, params), chunk_size)(xs)


def lax_map(row, chunk_size):
    """The loop that comes with JAX."""
    return lambda params, xs: jax.lax.map(
        ft.partial(row, params), xs, batch_size=chunk_size
    )


def lax_map_checkpoint(row, chunk_size):
    """The same, recomputing each row in the backward pass."""
    return lax_map(jax.checkpoint(row, prevent_cse=False), chunk_size)


def scan_checkpoint(row, chunk_size):
    """By hand, for batches that the chunk size divides: what the rest can aim for."""

    def batched(params, xs):
        @ft.partial(jax.checkpoint, prevent_cse=False)
        def chunk(params, start):
            rows = jax.lax.dynamic_slice_in_dim(xs, start, chunk_size)
            return jax.vmap(row, in_axes=(None, 0))(params, rows)

        starts = np.arange(0, len(xs), chunk_size)
        _, ys = jax.lax.scan(lambda _, i: (None, chunk(params, i)), None, starts)
        return ys.reshape(-1, *ys.shape[2:])

    return batched


def netket_forward(row, chunk_size):
    """NetKet's chunked vmap."""
    import netket as nk

    # Annotated as an integer there, documented as a tuple.
    in_axes: Any = (None, 0)
    return nk.jax.vmap_chunked(row, in_axes=in_axes, chunk_size=chunk_size)


def netket_gradient(row, chunk_size):
    """NetKet's chunked pullback: the caller separates the loss from the rows."""
    import netket as nk

    forward = netket_forward(row, chunk_size)
    options = {"chunk_argnums": 1, "nondiff_argnums": 1, "chunk_size": chunk_size}

    def gradient(params, xs):
        value, cotangent = jax.value_and_grad(loss)(forward(params, xs))
        pullback = nk.jax.vjp_chunked(vmap(row, None), params, xs, **options)
        return value, pullback(cotangent)[0]

    return gradient


def folx(row, chunk_size):
    """The batched vmap of folx."""
    from folx import batched_vmap

    return batched_vmap(row, chunk_size, in_axes=(None, 0))


def optax_forward(row, chunk_size):
    """The microbatched vmap of optax."""
    from optax.microbatching import micro_vmap

    return lambda params, xs: micro_vmap(
        ft.partial(row, params), microbatch_size=chunk_size
    )(xs)


def optax_gradient(row, chunk_size):
    """Accumulation by optax: the loss moves inside, and must be a mean over rows.

    So nothing is recomputed, which is less work than in the other methods.
    """
    from optax.microbatching import AccumulationType, microbatch

    return microbatch(
        jax.value_and_grad(lambda params, xs: loss(vmap(row, None)(params, xs))),
        argnums=1,
        microbatch_size=chunk_size,
        accumulator=AccumulationType.MEAN,
    )


def method(forward: Callable, gradient: Callable | None = None) -> dict:
    """Return what makes the program of each mode from (row, chunk_size)."""
    return {"forward": forward, "gradient": gradient or through(forward)}


METHODS = {
    BASELINE: method(vmap),
    "Chunked": method(chunked),
    "scan+checkpoint": method(scan_checkpoint),
    "lax.map": method(lax_map),
    "lax.map+checkpoint": method(lax_map_checkpoint),
    "netket": method(netket_forward, netket_gradient),
    "folx": method(folx),
    "optax": method(optax_forward, optax_gradient),
}


# --- Measuring ------------------------------------------------------------------------


def over_cells(measure: Callable, args) -> dict:
    """Return what `measure` gives for every workload and mode that was asked for."""
    cells = it.product(args.workloads, MODES)
    return {
        f"{workload} {mode}": measure(args, workload, mode) for workload, mode in cells
    }


def disagreement(results: Any, expected: Any) -> float:
    """Return the largest error over the leaves, each relative to its largest value."""
    pairs = zip(jtu.tree_leaves(results), jtu.tree_leaves(expected), strict=True)
    errors = [jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)) for a, b in pairs]
    return float(max(errors))


def measure_times(failures: dict, args, workload: str, mode: str) -> dict:
    """Return the median seconds of each method; note in `failures` why one has none."""
    row, params, batch, chunk_size = WORKLOADS[workload].build(args.quick)
    programs, expected = {}, None
    for name in args.methods:
        try:
            program = jax.jit(METHODS[name][mode](row, chunk_size))
            results = program(params, batch)
            expected = results if name == BASELINE else expected
            if (error := disagreement(results, expected)) > TOLERANCE:
                raise ArithmeticError(f"differs from {BASELINE} by {error:.1e}")
            programs[name] = program
        # Peers may be absent, or fail in ways of their own: the others go on.
        except Exception as e:
            text = f"{type(e).__name__}: {str(e).strip()}".splitlines()[0][:100]
            failures.setdefault(f"{name}: {text}", []).append(f"{workload} {mode}")
    times = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(params, batch))
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def measure_memory(args, workload: str, mode: str) -> dict:
    """Return the temporaries of each method's compiled program in MiB."""
    row, params, batch, chunk_size = WORKLOADS[workload].build(args.quick)
    memory = {}
    for name in args.methods:
        try:
            program = jax.jit(METHODS[name][mode](row, chunk_size))
            analysis: Any = program.lower(params, batch).compile().memory_analysis()
            memory[name] = analysis.temp_size_in_bytes / 2**20
        except Exception:  # The timing process says why.
            continue
    return memory


def measure_memory_elsewhere(args) -> dict:
    """Return `measure_memory` of every cell, read in another process.

    On CPU, recent XLA hides the temporaries of some fused operations unless a flag is
    set before JAX starts; the flag slows matrix products in loops, hence the process.
    """
    command = [sys.executable, os.path.abspath(__file__), "--memory"]
    command += ["--workloads", *args.workloads, "--methods", *args.methods]
    command += ["--quick"] if args.quick else []
    flags = os.environ.get("XLA_FLAGS", "")
    reading_flag = "--xla_cpu_experimental_ynn_fusion_type="
    # Older XLA aborts on a flag that it does not know, and needs none.
    for xla_flags in (f"{flags} {reading_flag}", flags):
        env = {**os.environ, "XLA_FLAGS": xla_flags}
        reading = subprocess.run(command, env=env, capture_output=True, text=True)
        if reading.returncode == 0:
            return json.loads(reading.stdout.splitlines()[-1])
    raise RuntimeError(f"Reading the memory failed:\n{reading.stderr}")


# --- Showing --------------------------------------------------------------------------


def print_table(title: str, mode: str, args, table: dict, form: str) -> None:
    """Print one row a method and one column a workload; `-` where there is no value."""
    first = max(len(name) for name in args.methods)
    print(f"\n{title}, {mode}\n{'':{first}}", *(f"{w:>12}" for w in args.workloads))
    for name in args.methods:
        values = [table[f"{w} {mode}"].get(name) for w in args.workloads]
        texts = ["-" if value is None else format(value, form) for value in values]
        print(f"{name:{first}}", *(f"{text:>12}" for text in texts))


def plot(args, ratios: dict, memory: dict, path: str) -> None:
    """Write grouped bars: time above and memory below, one column a mode."""
    figure, axes = plt.subplots(
        2, 2, sharey="row", figsize=(15, 8), layout="constrained"
    )
    quantities = (
        (ratios, "time / time of vmap", 2),
        (memory, "compiled temporaries (MiB)", 10),
    )
    width = 0.85 / len(args.methods)
    places = np.arange(len(args.workloads))
    for line, (table, label, base) in zip(axes, quantities, strict=True):
        for axis, mode in zip(line, MODES, strict=True):
            for i, name in enumerate(args.methods):
                cells = [table[f"{workload} {mode}"] for workload in args.workloads]
                heights = [cell.get(name, np.nan) for cell in cells]
                at = places + (i - (len(args.methods) - 1) / 2) * width
                axis.bar(at, heights, width, label=name, color=f"C{i}")
            axis.set_yscale("log", base=base)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_xticks(places, args.workloads)
            axis.set_ylabel(label)
            axis.set_title(f"{mode}: {label.split(' (')[0]}")
            axis.grid(axis="y", alpha=0.3)
    axes[1, 0].set_ylim(bottom=0.01)  # a loop counter is not worth four decades
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict:
    """Measure, print and plot; return what the JSON file holds."""
    parser = argparse.ArgumentParser(description="Compare chunked transforms.")
    for option, names in (("--workloads", WORKLOADS), ("--methods", METHODS)):
        parser.add_argument(option, nargs="+", choices=names, default=list(names))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="compare", help="path without the extension")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    # The unchunked program comes first: the others are compared with it.
    args.methods = [BASELINE, *(name for name in args.methods if name != BASELINE)]
    if args.memory:
        memory = over_cells(measure_memory, args)
        print(json.dumps(memory))
        return memory

    failures: dict[str, list[str]] = {}
    seconds = over_cells(ft.partial(measure_times, failures), args)
    memory = measure_memory_elsewhere(args)
    ratios = {
        cell: {name: value / times[BASELINE] for name, value in times.items()}
        for cell, times in seconds.items()
    }
    for mode in MODES:
        print_table("time / time of vmap", mode, args, ratios, ".2f")
        print_table("temporaries in MiB", mode, args, memory, ".2f")
    if failures:
        print("\nWithout a value (-):")
        for cause, where in failures.items():
            print(f"  {cause} ({', '.join(where)})")
    report = {"seconds": seconds, "ratios": ratios, "memory_mib": memory}
    report |= {"failures": failures, "jax": jax.__version__, "rounds": args.rounds}
    with open(f"{args.out}.json", "w") as file:
        json.dump(report, file, indent=2)
    plot(args, ratios, memory, f"{args.out}.png")
    print(f"\nwrote {args.out}.png and {args.out}.json")
    return report


if __name__ == "__main__":
    main()
