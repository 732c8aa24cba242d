"""Choice of the tests that run, and their spread over pytest-xdist's workers: by file; a host's as one, for its ranks.

A test marked `@pytest.mark.slow_group("kernels/", "tests/ptx/")` is skipped while nothing in these folders (or files) differs
from main: neither a commit of this branch (on main: the last commit) nor a change that is not committed. `--all`, or CI or
INTERDOMAIN_ALL_TESTS in the environment, runs every test; so does a folder that is no git clone. `.ci/run` runs them all.

Without their hosts tests/titan, tests/docs and tests/megatron are left out, so that a GPU machine that has PyTorch and Triton
alone can run `pytest -m gpu`.
"""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TITAN, MEGATRON = "tests/titan/", "tests/megatron/"
# A host's tests share ranks, but for the longest, which have processes of their own.
UNITS = "tests/titan/test_study_run", TITAN, MEGATRON
LONGEST = (
    TITAN,
    "tests/ptx/",
    MEGATRON,
    "tests/docs/test_blocks",
    "tests/hf/test_alone",
    "tests/tools/test_launch",
    "tests/scan/test_triton_gpu",
)

HOSTS = {"titan": "torchtitan", "docs": "torchtitan", "megatron": "megatron"}
collect_ignore = [name for name, needs in HOSTS.items() if importlib.util.find_spec(needs) is None]


def pytest_configure():
    """Imports are quicker without the collector; in the processes that tests start, too."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job, whose children would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    start = Path(__file__).parent / "start"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(start), os.environ.get("PYTHONPATH"))))


def pytest_collection_finish():
    """Imported modules stay: the collector need not look through it in every test."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # else nanobind, which Triton is bound by, prints what it takes for leaks
    gc.enable()


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the slow groups, too (conftest.py)")


def changed_files():
    """Paths that differ from main, from the repository's root; None if git cannot tell."""

    def git(*command):
        done = subprocess.run(["git", *command], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
        return done.stdout.split("\n")[:-1] if done.returncode == 0 else None

    try:
        base = git("merge-base", "HEAD", "main") or git("merge-base", "HEAD", "origin/main")
        if base and base == git("rev-parse", "HEAD"):
            base = git("rev-parse", "HEAD~1")
        committed = git("diff", "--name-only", *base) if base else None
        new = git("ls-files", "--others", "--exclude-standard")
    except FileNotFoundError:
        return None
    return None if committed is None or new is None else committed + new


def run_all(config):
    return config.getoption("--all") or any(os.environ.get(name) for name in ("CI", "INTERDOMAIN_ALL_TESTS"))


def pytest_report_header(config):
    lines = [f"tests/{name}: left out, {HOSTS[name]} is not installed" for name in collect_ignore]
    if not run_all(config):
        lines.append("slow groups: skipped where their folders are as on main (listed at the end); run them with --all")
    return lines


def pytest_collection_modifyitems(config, items):
    """Skips slow groups. The longest units first: what comes last is short, so that both workers end together."""
    groups = [(item, mark.args) for item in items for mark in item.iter_markers("slow_group")]
    changed = changed_files() if groups and not run_all(config) else None
    for item, folders in groups if changed is not None else ():
        if not any(path.startswith(folders) for path in changed):
            reason = f"slow group of {', '.join(folders)}, unchanged since main: run it with --all"
            item.add_marker(pytest.mark.skip(reason=reason))

    def place(item):
        return next((i for i, unit in enumerate(LONGEST) if item.nodeid.startswith(unit)), len(LONGEST))

    items.sort(key=place)


@pytest.fixture(autouse=True)
def sigterm_as_before():
    """A refusal (`titan.errors.stop`) ignores SIGTERM until its process ends. Here the process goes on, and starts others."""
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
    """exported_model(condition, **settings) -> (a small model, its folder as convert writes it, which no test changes)."""
    from interdomain.tools import convert

    from .tools.checkpoints import small_model, write_checkpoint

    path, made = tmp_path_factory.mktemp("exported"), {}

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
    """transformers copies a folder's code here and imports it from here: one place per process, and not the user's."""
    dynamic = pytest.importorskip(
        "transformers.dynamic_module_utils", reason="the extra `hf` (or `dev`) is not installed", exc_type=ImportError
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
            return next((unit for unit in UNITS if nodeid.startswith(unit)), nodeid.partition("::")[0])

    return ByFile(config, log)
