"""Fit a neural network to a photograph, with every pixel of the batch in every step.

A coordinate network (random Fourier features, then an MLP) maps the position of one
pixel to its colour. It is written for one pixel, and
`Chunked(network, chunk_size)` makes it take all of them: 68,480 rows per training step
(every second pixel each way of a 427 x 640 photograph) and 273,280 rows when the full
picture is rendered. The training step is an ordinary one; the wrapper is its only trace
of chunking, and the memory of the step no longer grows with the batch.

    python examples/fit_image.py [--steps 180] [--chunk-size 2048] [--out fit_image.png]

Expected output (two CPU cores, busy with other work too), besides `fit_image.png`:

    68,480 pixels in every step, 2,048 at a time
    memory of the training step (compiled temporaries):
      chunked         4.5 MiB
      unchunked     152.0 MiB
    180 steps in 83 s
    273,280 pixels rendered in 1.0 s
    PSNR 21.29 dB on the training pixels, 20.46 dB on all pixels
    wrote fit_image.png
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_sample_image
from tqdm import tqdm

import chunked_eqx as ceqx


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


class CoordinateNetwork(eqx.Module):
    """The colour of one pixel as a function of its position."""

    frequencies: jax.Array  # (features, 2)
    mlp: eqx.nn.MLP

    def __init__(self, features: int = 96, width: int = 96, *, key: jax.Array):
        frequency_key, mlp_key = jr.split(key)
        # In cycles per picture height. Like a photograph's spectrum, many are low and
        # a few are high; a wider spread shows as noise between the training pixels.
        self.frequencies = 7.0 * jr.laplace(frequency_key, (features, 2))
        self.mlp = eqx.nn.MLP(
            2 * features, 3, width, 2, jax.nn.relu, jax.nn.sigmoid, key=mlp_key
        )

    def __call__(self, position: jax.Array) -> jax.Array:
        """Return red, green and blue, each in [0, 1], at (row, column)."""
        frequencies = jax.lax.stop_gradient(self.frequencies)
        phase = 2 * jnp.pi * (frequencies @ position)
        # The shift makes cosines: XLA computes one sine faster than one of each.
        return self.mlp(jnp.sin(jnp.concatenate([phase, phase + jnp.pi / 2])))


def load_picture() -> tuple[np.ndarray, np.ndarray]:
    """Return positions, (height, width, 2), and colours, (height, width, 3)."""
    colours = load_sample_image("china.jpg").astype(np.float32) / 255
    height, width, _ = colours.shape
    rows, columns = np.mgrid[:height, :width]
    # One unit of length for both axes, so that texture is equally fine along each.
    positions = np.stack([rows, columns], axis=-1).astype(np.float32) / height
    return positions, colours


def make_step(optimizer: optax.GradientTransformation) -> Callable:
    """Return the training step: nothing in it knows about chunks."""

    @eqx.filter_value_and_grad
    def loss_and_gradient(model, positions, colours):
        return jnp.mean((model(positions) - colours) ** 2)

    @eqx.filter_jit
    def step(model, opt_state, positions, colours):
        loss, gradient = loss_and_gradient(model, positions, colours)
        updates, opt_state = optimizer.update(
            gradient, opt_state, eqx.filter(model, eqx.is_inexact_array)
        )
        return eqx.apply_updates(model, updates), opt_state, loss

    return step


def training_setup(chunk_size: int | None, steps: int) -> tuple:
    """Return the step, the model, the optimizer's state and the training pixels."""
    positions, colours = load_picture()
    train_positions = jnp.asarray(positions[::2, ::2].reshape(-1, 2))
    train_colours = jnp.asarray(colours[::2, ::2].reshape(-1, 3))
    network = CoordinateNetwork(key=jr.key(0))
    model = ceqx.Chunked(network, chunk_size)  # the one line that chunks
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, steps), b2=0.99)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return make_step(optimizer), model, opt_state, train_positions, train_colours


def step_memory(chunk_size: int | None) -> float:
    """Return the temporaries of the compiled training step in MiB, without running."""
    step, *args = training_setup(chunk_size, steps=1)
    compiled = step.lower(*args).compile().compiled
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


def step_memory_elsewhere(chunk_size: int) -> tuple[float, float]:
    """Return `step_memory` with and without chunks, read in another process.

    On CPU, recent XLA hides the temporaries of some fused operations unless a flag is
    set before JAX starts; the flag slows matrix products in loops, hence the process.
    """
    command = [sys.executable, os.path.abspath(__file__), "--memory"]
    command += ["--chunk-size", str(chunk_size)]
    flags = os.environ.get("XLA_FLAGS", "")
    reading_flag = "--xla_cpu_experimental_ynn_fusion_type="
    # Older XLA aborts on a flag that it does not know, and needs none.
    for xla_flags in (f"{flags} {reading_flag}", flags):
        env = {**os.environ, "XLA_FLAGS": xla_flags}
        reading = subprocess.run(command, env=env, capture_output=True, text=True)
        if reading.returncode == 0:
            chunked, unchunked = json.loads(reading.stdout.splitlines()[-1])
            return chunked, unchunked
    raise RuntimeError(f"Reading the memory failed:\n{reading.stderr}")


def psnr(mean_squared_error: float) -> float:
    """Return the peak signal-to-noise ratio in dB, for colours in [0, 1]."""
    return -10 * float(np.log10(mean_squared_error))


def plot(original: np.ndarray, render: np.ndarray, losses: list, path: str) -> None:
    """Write the original, the render and the training curve to a PNG."""
    figure = plt.figure(figsize=(11, 7.6), layout="constrained")
    axes = figure.subplot_mosaic([["original", "render"], ["curve", "curve"]])
    quality = psnr(float(np.mean((render - original) ** 2)))
    titles = {
        "original": f"Original ({original.shape[1]} x {original.shape[0]} pixels)",
        "render": f"Network, all pixels ({quality:.1f} dB)",
    }
    for name, picture in (("original", original), ("render", render)):
        axes[name].imshow(picture)
        axes[name].set_title(titles[name])
        axes[name].set_xlabel("column (pixels)")
        axes[name].set_ylabel("row (pixels)")
    steps = np.arange(1, len(losses) + 1)
    (loss_line,) = axes["curve"].semilogy(steps, losses, "C0", label="loss (left)")
    axes["curve"].set_title("Full-batch training on every second pixel each way")
    axes["curve"].set_xlabel("training step")
    axes["curve"].set_ylabel("mean squared error (colours in [0, 1])")
    axes["curve"].grid(alpha=0.3)
    right = axes["curve"].twinx()
    psnrs = [psnr(loss) for loss in losses]
    (psnr_line,) = right.plot(steps, psnrs, "C1--", label="PSNR (right)")
    right.set_ylabel("PSNR on the training pixels (dB)")
    right.legend(handles=[loss_line, psnr_line], loc="center right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> float:
    """Train, render and plot; return the PSNR on the training pixels in dB."""
    parser = argparse.ArgumentParser(description="Fit a network to a photograph.")
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--chunk-size", type=int, default=2048, help="pixels at a time")
    parser.add_argument("--out", default="fit_image.png", help="the PNG to write")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.memory:
        print(json.dumps([step_memory(args.chunk_size), step_memory(None)]))
        return 0.0

    chunked, unchunked = step_memory_elsewhere(args.chunk_size)
    step, model, opt_state, *pixels = training_setup(args.chunk_size, args.steps)
    print(f"{len(pixels[0]):,} pixels in every step, {args.chunk_size:,} at a time")
    print("memory of the training step (compiled temporaries):")
    print(f"  chunked    {chunked:8.1f} MiB")
    print(f"  unchunked  {unchunked:8.1f} MiB")

    start = time.perf_counter()
    losses = []
    for _ in (bar := tqdm(range(args.steps), desc="training")):
        model, opt_state, loss = step(model, opt_state, *pixels)
        losses.append(float(loss))
        bar.set_postfix(loss=f"{losses[-1]:.5f}", PSNR=f"{psnr(losses[-1]):.2f} dB")
    trained = time.perf_counter()

    positions, colours = load_picture()
    render = model(jnp.asarray(positions.reshape(-1, 2)))
    render = np.asarray(render).reshape(colours.shape)
    rendered = time.perf_counter()
    error = (render - colours) ** 2
    train_psnr = psnr(float(error[::2, ::2].mean()))
    print(f"{args.steps} steps in {trained - start:.0f} s")
    print(f"{positions[..., 0].size:,} pixels rendered in {rendered - trained:.1f} s")
    print(f"PSNR {train_psnr:.2f} dB on the training pixels", end=", ")
    print(f"{psnr(float(error.mean())):.2f} dB on all pixels")
    plot(colours, render, losses, args.out)
    print(f"wrote {args.out}")
    return train_psnr


if __name__ == "__main__":
    main()
