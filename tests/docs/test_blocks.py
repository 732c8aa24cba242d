"""The commands and code of README.md and docs/ run, in a folder as a reader has it after the page of the first run.

- ```bash: a tool runs in this process, and of `study run` the plan. `./launch.sh` is a dry run, and in a tutorial a training
  run on ranks that are forks of one process (tests/tools/test_launch.py has the real start). A tutorial's other commands run in
  bash; of a page's the files that they name must exist.
- ```python: runs, in one namespace for each page; so do notebooks.
- A block that begins with `# needs: ` says what this machine may lack. Its options must exist, its Python must parse.

Small are: the corpus, 400 kB; and training, where a hundred steps of a command or a file are one, of two sequences. The pages
beyond README and the first run are slow tests.
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
from interdomain.titan.settings.job_config import read_job_config
from interdomain.tools import convert, launch, prepare_data, study
from interdomain.tools import main as tools

from ..common import REPOSITORY, TIMEOUT
from ..test_repository import PYPROJECT
from .conftest import WRITTEN, Workspace
from .pages import PAGES, blocks, commands, prose, simple_commands

EXTRAS = PYPROJECT["project"]["optional-dependencies"]
README, FIRST_RUN = REPOSITORY / "README.md", REPOSITORY / "docs/tutorials/first-run.md"
SLOW = pytest.mark.slow


def name_of(page):
    return str(page.relative_to(REPOSITORY))


def fewer(text):
    """A hundred steps are one: --training.steps 400, step-400, exports/debug-step400."""
    return re.sub(r"((?:steps?|interval|freq)[ =-]*)(\d+)00\b", r"\1\2", text)


def tool_of(command):
    """(module, arguments) of one of our commands, or None."""
    if command[0] == ".venv/bin/interdomain":
        return importlib.import_module(
            f"interdomain.tools.{tools.TOOLS[command[1]].stem}"
        ), command[2:]
    if command[0] == "./launch.sh" and command[1:2] != ["test"]:
        return launch, command[1:]
    return None


def parse(module, argv):
    """The tool knows the options, and the launcher the settings."""
    parsed = getattr(module, "parse", len)(argv)
    if module is launch:
        read_job_config(["--job.config_file", parsed[0].config, *parsed[1]])


def exists(command):
    """The files and extras of the repository that a command names are there."""
    for before, word in itertools.pairwise(command):
        file = word.partition("::")[0]
        if before != "--output" and re.match(
            r"(\./)?(tests|train_configs|benchmarks|tools|docs|plugin|kernels)/", file
        ):
            assert glob.glob(file), f"{file} does not exist"
        if extras := re.fullmatch(r"\.\[([\w,]+)\]", word):
            assert set(extras[1].split(",")) <= EXTRAS.keys(), (
                f"{word} names an extra that pyproject.toml lacks"
            )


def run(text, workspace, tutorial):
    """One line of bash."""
    for command in simple_commands(text):
        stop = command[0] == "timeout"  # stands for whatever ends a run
        command = command[2:] if stop else command
        if (tool := tool_of(command)) is None:
            if tutorial:
                bash = ["bash", "-euo", "pipefail", "-c", text]
                subprocess.run(bash, stdin=subprocess.DEVNULL, timeout=TIMEOUT, check=True)
                return
            exists(command)
            continue
        module, argv = tool
        if module is study and argv[0] == "run":
            parse(study, argv)
            argv = ["plan", argv[1]]
        if (
            module is convert and "--output" in argv
        ):  # it overwrites nothing, and a page may begin with it
            shutil.rmtree(argv[argv.index("--output") + 1], ignore_errors=True)
        if module is not launch:
            argv = [
                path
                for word in argv
                for path in ("'" not in text and sorted(glob.glob(word))) or [word]
            ]
            status = module.main(argv)
        elif tutorial and "--dry-run" not in argv:
            status = workspace.train(argv, stop)
        else:
            status = launch.main([*argv, "--dry-run"])
        assert status == (launch.CONTINUE if stop else 0), f"exit status {status}"


def do(block, page, namespace, workspace):
    if block.language == "python":
        code = compile("\n" * (block.line - 1) + fewer(block.text), name_of(page), "exec")
        if not block.needs:
            exec(code, namespace)
        return
    for line, text in commands(block):
        try:
            if not block.needs:
                run(fewer(text), workspace, page.parent.name == "tutorials")
                continue
            for command in simple_commands(text):
                if tool := tool_of(command):
                    parse(*tool)
                else:
                    exists(command)
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not error.code:  # --help, --flags
                continue
            raise AssertionError(
                f"{name_of(page)}:{line}: {text}\n{type(error).__name__}: {error}"
            ) from error


def run_page(page, workspace):
    namespace, before = {"__name__": "__main__"}, {*os.listdir(), *WRITTEN, "small"}
    kinds = settings.KINDS.copy()
    with mock.patch.dict(config.CONDITIONS), mock.patch.dict(transformer.MIXER_CLASSES):
        for block in blocks(page):
            if block.language in ("bash", "python"):
                do(block, page, namespace, workspace)
    settings.KINDS[:] = kinds
    assert {*os.listdir()} <= before, "a command writes where git does not ignore it"


@pytest.fixture(scope="module")
def after_the_first_run(clone, environment, ranks):
    """The page of the first run, run: data/stdlib, of 400 kB; outputs/debug, of four small steps; exports/debug."""
    prepare = prepare_data.main
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(clone)
        patch.setattr(
            prepare_data,
            "main",
            lambda argv: prepare([*argv, "--max-bytes", "400000", "--vocab-size", "512"]),
        )
        run_page(FIRST_RUN, Workspace(clone, ranks))
    return clone


@pytest.fixture
def workspace(tmp_path, monkeypatch, after_the_first_run, ranks):
    """The working folder, one for each page, of links to the first run's files. Nothing may ask the user."""
    path = tmp_path / "workspace"
    shutil.copytree(after_the_first_run, path, symlinks=True, copy_function=os.link)
    monkeypatch.chdir(path)
    asked = []  # transformers 5 asks whether to trust a folder's code, and goes on without an answer
    monkeypatch.setattr("builtins.input", asked.append)
    yield Workspace(path, ranks)
    assert not asked, "a reader would have to answer, or to wait"


def test_the_first_run(after_the_first_run):
    for written in (
        "data/stdlib/manifest.json",
        "outputs/debug-softmax/checkpoint",
        "exports/debug/config.json",
    ):
        assert (after_the_first_run / written).exists()


def test_a_model_card_s_example_runs(workspace, capsys):
    """Before the pages: some register the model in this process, and then transformers asks nothing."""
    (example,) = [
        block for block in blocks(Path("exports/debug/README.md")) if block.language == "python"
    ]
    exec(example.text.replace("path/to/this/folder", "exports/debug"), {})
    assert "Once upon a time" in capsys.readouterr().out
    (command,) = [
        block for block in blocks(Path("exports/debug/README.md")) if block.language == "bash"
    ]
    program, *words = shlex.split(command.text.replace("path/to/this/folder", "exports/debug"))
    assert (program, tools.main([*words, "--max-tokens", "2"])) == ("interdomain", 0)
    assert "Once upon a time" in capsys.readouterr().out


OTHER_PAGES = [
    p
    for p in PAGES
    if p not in (README, FIRST_RUN) and any(b.language in ("bash", "python") for b in blocks(p))
]


@pytest.mark.parametrize(
    "page", [README, *(pytest.param(page, marks=SLOW) for page in OTHER_PAGES)], ids=name_of
)
def test_a_page_s_blocks_run(page, workspace):
    run_page(page, workspace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_and_options_that_a_page_names_exist(page, capsys):
    from interdomain.titan.settings.schema import SETTINGS

    text = prose(page)
    sections = {setting.partition(".")[0] for setting in SETTINGS}
    for section, field in re.findall(r"--([a-z_]+)\.([a-z][\w-]*)", text):
        if section in sections:
            assert f"{section}.{field.removeprefix('no-').replace('-', '_')}" in SETTINGS, (
                f"no setting {section}.{field}"
            )
    for name, rest in re.findall(
        rf"`(?:\.venv/bin/interdomain )?({'|'.join(tools.TOOLS)})( [^`]*)`", text
    ):
        subcommand = re.findall(r"^ ([a-z]+)\b", rest)
        with pytest.raises(SystemExit):
            tools.main([name, *subcommand, "--help"])
        shown = capsys.readouterr().out
        for option in (word for word in shlex.split(rest) if word.startswith("--")):
            assert re.search(rf"{option}\b", shown), f"{name} has no {option}"
