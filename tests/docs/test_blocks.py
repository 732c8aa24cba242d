"""The commands and code of README.md and docs/ run, in a folder as a reader has it after the page of the first run.

- ```bash: a tool runs in this process. `./launch.sh` is a dry run, and on the pages TYPED_ALONG a
  training run on ranks that are forks of one process (tests/tools/test_launch.py has the real start). Other commands of these
  pages run in bash. Another page's other commands do not run: the files that they name must exist.
- ```python runs, in one namespace for each page; so do notebooks.
- A block that begins with `# needs: ` says what this machine may lack. Its options must exist, its Python must parse.

The corpus has 400 kB. A hundred training steps of a command or a file are one step, of two sequences. The pages beyond README
and the first run are slow tests.
"""

import glob
import importlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from interdomain.model import config, settings, transformer
from interdomain.titan.settings import schema
from interdomain.titan.settings.job_config import read_job_config
from interdomain.tools import convert, launch, prepare_data
from interdomain.tools import main as tools

from ..common import REPOSITORY, TIMEOUT
from .conftest import WRITTEN, Workspace
from .pages import PAGES, blocks, commands, prose, simple_commands

README = REPOSITORY / "README.md"
FIRST_RUN = REPOSITORY / "docs/start.md"
# On these pages commands train, and lines of bash run.
TYPED_ALONG = {REPOSITORY / "docs" / name for name in ("start.md", "data.md", "clusters.md")}
SLOW = pytest.mark.slow


def name_of(page):
    return str(page.relative_to(REPOSITORY))


def fewer(text):
    """Makes one step of a hundred: --training.steps 400, step-400, exports/debug-step400."""
    return re.sub(r"((?:steps?|interval|freq)[ =-]*)(\d+)00\b", r"\1\2", text)


def tool_of(command):
    """Returns the module and the arguments of one of our commands, or None and the arguments."""
    if command[0] == ".venv/bin/interdomain":
        file = tools.TOOLS[command[1]]
        return importlib.import_module(f"interdomain.tools.{file.stem}"), command[2:]
    if command[0] == "./launch.sh" and command[1:2] != ["test"]:
        return launch, command[1:]
    return None, command[1:]


def check_options(module, argv):
    """The tool knows the options, and the launcher the settings."""
    if module is launch:
        args, flags = launch.parse(argv)
        read_job_config(["--job.config_file", args.config, *flags])
    else:
        module.parse(argv)


def check_files(command):
    """The files of the repository that a command names are there."""
    folders = r"(\./)?(tests|train_configs|benchmarks|tools|docs|plugin|kernels)/"
    for before, word in itertools.pairwise(command):
        file = word.partition("::")[0]
        if before != "--output" and re.match(folders, file):
            assert glob.glob(file), f"{file} does not exist"


def run_tool(module, argv, workspace, train, stop):
    """Returns the exit status of one of our commands. `train`: the launcher trains; `stop`: until it is asked to leave."""
    if module is launch:
        if train and "--dry-run" not in argv:
            return workspace.train(argv, stop)
        return launch.main([*argv, "--dry-run"])
    # convert overwrites nothing, and a page may begin with it.
    if module is convert and "--output" in argv:
        shutil.rmtree(argv[argv.index("--output") + 1], ignore_errors=True)
    return module.main(argv)


def run(text, workspace, typed_along):
    """Runs one line of bash."""
    for command in simple_commands(text):
        stop = command[0] == "timeout"  # stands for whatever ends a run
        if stop:
            command = command[2:]
        module, argv = tool_of(command)
        if module is not None:
            status = run_tool(module, argv, workspace, typed_along, stop)
            assert status == (launch.CONTINUE if stop else 0), f"exit status {status}"
        elif typed_along:
            bash = ["bash", "-euo", "pipefail", "-c", text]
            subprocess.run(bash, stdin=subprocess.DEVNULL, timeout=TIMEOUT, check=True)
            return
        else:
            check_files(command)


def check(text):
    """Checks a line of bash that needs what this machine may lack."""
    for command in simple_commands(text):
        module, argv = tool_of(command)
        if module is None:
            check_files(command)
        else:
            check_options(module, argv)


def run_bash(block, page, workspace):
    for line, text in commands(block):
        try:
            if block.needs:
                check(fewer(text))
            else:
                run(fewer(text), workspace, page in TYPED_ALONG)
        except (Exception, SystemExit) as error:
            error.add_note(f"{name_of(page)}:{line}: {text}")
            raise


def run_page(page, workspace):
    namespace = {"__name__": "__main__"}
    before = {*os.listdir(), *WRITTEN, "small"}
    kinds = settings.KINDS.copy()
    with mock.patch.dict(config.CONDITIONS), mock.patch.dict(transformer.MIXER_CLASSES):
        for block in blocks(page):
            if block.language == "bash":
                run_bash(block, page, workspace)
            elif block.language == "python":
                # The lines of an error are the page's.
                text = "\n" * (block.line - 1) + fewer(block.text)
                code = compile(text, name_of(page), "exec")
                if not block.needs:
                    exec(code, namespace)
    settings.KINDS[:] = kinds
    assert set(os.listdir()) <= before, "a command writes where git does not ignore it"


@pytest.fixture(scope="module")
def after_the_first_run(clone, environment):
    """The clone after the page of the first run: data/stdlib, of 400 kB; outputs/debug, of four small steps; exports/debug."""
    prepare = prepare_data.main

    def prepare_little(argv):
        return prepare([*argv, "--max-bytes", "400000", "--vocab-size", "512"])

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(clone)
        patch.setattr(prepare_data, "main", prepare_little)
        run_page(FIRST_RUN, Workspace(clone))
    return clone


@pytest.fixture
def workspace(tmp_path, monkeypatch, after_the_first_run):
    """The working folder, one for each page, of links to the first run's files. Nothing may ask the user."""
    path = tmp_path / "workspace"
    shutil.copytree(after_the_first_run, path, symlinks=True, copy_function=os.link)
    monkeypatch.chdir(path)
    asked = []  # transformers 5 asks whether to trust a folder's code, and goes on without an answer
    monkeypatch.setattr("builtins.input", asked.append)
    yield Workspace(path)
    assert not asked, "a reader would have to answer, or to wait"


def test_a_model_card_s_example_runs(workspace, capsys):
    """It runs before the pages: some register the model in this process, and then transformers asks nothing."""
    for block in blocks(Path("exports/debug/README.md")):
        text = block.text.replace("path/to/this/folder", "exports/debug")
        if block.language == "python":
            exec(text, {})
            assert "Once upon a time" in capsys.readouterr().out
        elif block.language == "bash":
            program, *words = shlex.split(text)
            assert program == "interdomain"
            assert tools.main([*words, "--max-tokens", "2"]) == 0
            assert "Once upon a time" in capsys.readouterr().out


def pages_that_run():
    """Yields README, and as slow tests the pages beyond it that have code."""
    yield README
    for page in PAGES:
        languages = {block.language for block in blocks(page)}
        if page not in (README, FIRST_RUN) and languages & {"bash", "python"}:
            yield pytest.param(page, marks=SLOW)


@pytest.mark.parametrize("page", pages_that_run(), ids=name_of)
def test_a_page_s_blocks_run(page, workspace):
    run_page(page, workspace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_that_a_page_names_exist(page):
    sections = "|".join({setting.partition(".")[0] for setting in schema.SETTINGS})
    for name in re.findall(rf"--((?:{sections})\.[a-z][\w-]*)", prose(page)):
        assert name.replace(".no-", ".").replace("-", "_") in schema.SETTINGS
