"""The examples and the README's code run as they stand there."""

import os
import pathlib
import re
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parents[1]


def _run(*args, cwd):
    # As a user runs them: without the options of the tests.
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_fit_image(tmp_path):
    script = ROOT / "examples" / "fit_image.py"
    printed = _run(script, "--steps", 2, "--out", "small.png", cwd=tmp_path)
    memory = re.findall(r"([\d.,]+) MiB", printed)
    chunked, unchunked = sorted(float(x.replace(",", "")) for x in memory[:2])
    assert 10 * chunked < unchunked
    assert (tmp_path / "small.png").stat().st_size > 100_000


@pytest.mark.slow
def test_compare(tmp_path):
    script = ROOT / "examples" / "benchmarks" / "compare.py"
    printed = _run(script, "--quick", "--workloads", "mlp1024", "gru", cwd=tmp_path)
    assert re.search(r"^Chunked +[\d.]+ +[\d.]+$", printed, re.MULTILINE)
    assert (tmp_path / "compare.png").exists()
    assert (tmp_path / "compare.json").exists()


def test_readme(tmp_path):
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    _run(script, cwd=tmp_path)
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^make (\w+)", text, re.MULTILINE)
    assert commands == ["demo", "test"]
    assert all(f"\n{command}:" in makefile for command in commands)
