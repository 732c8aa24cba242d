"""Choice of the tests that run, and their spread over pytest-xdist's workers: by file; files that share ranks or models as one.

A test marked `slow` is left out only if the whole suite is asked for: it runs with `--all`, with CI in the environment, and
whenever tests are named, by a path, -k or -m. The choice does not look at what has changed.

Without their hosts tests/titan, tests/docs and tests/megatron are left out, so that a GPU machine that has PyTorch and Triton
alone can run `pytest -m gpu`.
"""

import gc
import importlib.util
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

TITAN, MEGATRON, HF = "tests/titan/", "tests/megatron/", "tests/hf/"
# Units that take the longest. They start first, so that all workers end together.
LONGEST = (
    TITAN,
    "tests/ptx/",
    MEGATRON,
    "tests/docs/test_blocks",
    HF,
    "tests/tools/test_launch",
    "tests/scan/test_triton_gpu",
)

HOSTS = {"titan": "torchtitan", "docs": "torchtitan", "megatron": "megatron"}
collect_ignore = [name for name, needs in HOSTS.items() if importlib.util.find_spec(needs) is None]


def pytest_configure():
    """Imports are quicker without the collector, also in the processes that tests start."""
    # A shell's background job ignores SIGINT, and its children would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    path = str(Path(__file__).parent / "start")
    if os.environ.get("PYTHONPATH"):
        path += os.pathsep + os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"] = path


def pytest_collection_finish():
    """Imported modules stay: the collector need not look through it in every test."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # else nanobind, which Triton is bound by, prints what it takes for leaks
    gc.enable()


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="run the tests marked slow, too (conftest.py)"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Adds to a failure the command that repeats it."""
    report = yield
    if report.failed:
        command = f"./launch.sh test {shlex.quote(item.nodeid)}"
        report.sections.append(("to repeat it", command))
    return report


def pytest_report_header(config):
    return [f"tests/{name}: left out, {HOSTS[name]} is not installed" for name in collect_ignore]


def pytest_collection_modifyitems(config, items):
    """Leaves slow tests out of the whole suite, and sorts by LONGEST."""
    tests_are_named = (
        config.args != config.getini("testpaths") or config.option.keyword or config.option.markexpr
    )
    if not (tests_are_named or config.getoption("--all") or "CI" in os.environ):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run it with --all, or name it"))

    items.sort(key=place)


def place(item):
    for i, unit in enumerate(LONGEST):
        if item.nodeid.startswith(unit):
            return i
    return len(LONGEST)


@pytest.fixture(autouse=True)
def sigterm_as_before():
    """A refusal (`titan.errors.stop`) ignores SIGTERM until its process ends. The tests' process goes on, and starts others."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A small sentencepiece tokenizer; tests/data has every kind."""
    from interdomain.data import load_tokenizer

    from .common import small_tokenizer

    return load_tokenizer(small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"))


@pytest.fixture(scope="session")
def exported_model(tmp_path_factory, tokenizer):
    """exported_model(condition, **settings): a small model, and its folder as convert writes it, which no test changes."""
    from interdomain.tools import convert

    from .tools.checkpoints import small_model, write_checkpoint

    path = tmp_path_factory.mktemp("exported")
    made = {}

    def export(condition, **settings):
        name = f"{condition} {settings}"
        if name not in made:
            model = small_model(condition, **settings).eval()
            checkpoint = write_checkpoint(path / f"run-{len(made)}", model, tokenizer)
            folder = path / f"folder-{len(made)}"
            assert convert.main([str(checkpoint), "--output", str(folder)]) == 0
            made[name] = model, folder
        return made[name]

    return export


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory):
    """transformers copies a folder's code here and imports it. Each process has a place, and leaves the user's alone."""
    dynamic = pytest.importorskip(
        "transformers.dynamic_module_utils",
        reason="the extra `hf` (or `dev`) is not installed",
        exc_type=ImportError,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            """The unit of tests that one worker runs: a file, or the files that share ranks, their parent or models."""
            file = nodeid.partition("::")[0]
            if file.startswith((MEGATRON, HF)):
                return str(Path(file).parent)
            forks_ranks = r"from \.\.ranks import"
            if file.startswith(TITAN):
                forks_ranks += r"|def .*\bruns\b"
            text = (config.rootpath / file).read_text()
            return TITAN if re.search(forks_ranks, text) else file

    return ByFile(config, log)
