"""What holds for every run: Hypothesis profiles, Ctrl-C, widths, folders, garbage."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

from ridgeline.engine.setup.home import default_home
from tests.own_home import own_home

# Every run tries the same examples: they have no constants of the modules that are loaded, which
# change with the tests that the same process has run before.
providers._get_local_constants = lambda: providers._local_constants
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,  # times vary with the machine, and no behaviour depends on them
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "mutants",  # where a failure is what is hoped for, the smallest example is of no interest
    settings.get_profile("ci"),
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("ci")

# A shell lets what it starts in the background ignore Ctrl-C, which tests send. Their children
# inherit that, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tables are as wide as what they are written to allows. A worker of xdist says 80 to all.
os.environ.pop("COLUMNS", None)

# Tests start hundreds of programs. Where Python is told to keep no bytecode, each would compile the
# package anew, for half a second: it is kept in a folder that goes with the run. Workers find it.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", "") and "PYTHONPYCACHEPREFIX" not in os.environ:
    os.environ["PYTHONPYCACHEPREFIX"] = tempfile.mkdtemp(prefix="ridgeline-bytecode-")
    atexit.register(shutil.rmtree, os.environ["PYTHONPYCACHEPREFIX"], ignore_errors=True)

# Servers learn how fast a model is, and keep batches: of the tests' models the user wants neither.
# Workers find the folder.
if "RIDGELINE_TESTS" not in os.environ:
    os.environ["RIDGELINE_TESTS"] = tempfile.mkdtemp(prefix="ridgeline-tests-")
    os.environ |= own_home(Path(os.environ["RIDGELINE_TESTS"]) / "home", default_home())
    atexit.register(shutil.rmtree, os.environ["RIDGELINE_TESTS"], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish() -> Iterator[None]:
    """Let the garbage collector pass over what is there before the first test, as it stays."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def garbage_is_of_its_own_file() -> Iterator[None]:
    """What a file leaves open fails there, and not in a test of another one."""
    yield
    gc.collect()
