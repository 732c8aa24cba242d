"""The repository as a package: which package imports what, what the wheel holds, file lengths, the commands."""

import ast
import graphlib
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from interdomain import patches
from interdomain.removed import REMOVED
from interdomain.tools import _cli, main

from .common import REPOSITORY

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PLUGIN = REPOSITORY / "plugin"
MAX_LINES = 900


def files(*endings):
    """Returns every file that is or may become a part of the repository and has one of the endings."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.check_output(command, cwd=REPOSITORY, text=True)
    paths = [REPOSITORY / name for name in listed.split("\0") if name.endswith(endings or ("",))]
    return [path for path in paths if path.is_file()]


def find_modules():
    """Returns {import name: file}. The package's links lead to kernels/scan, kernels/features and tools."""
    modules = {}
    for folder, _, names in os.walk(PLUGIN / "interdomain", followlinks=True):
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py":
                parts = path.relative_to(PLUGIN).with_suffix("").parts
                modules[".".join(parts).removesuffix(".__init__")] = path
    return dict(sorted(modules.items()))


MODULES = find_modules()


# Which package imports what

# The packages that each of ours may import, besides the standard library and itself.
ALLOWED = {
    "checkpoint": [
        "interdomain.data",
        "interdomain.folders",
        "interdomain.markdown",
        "interdomain.model",
        "interdomain.patches",
        "jinja2",
        "numpy",
        "safetensors",
        "tensorboard",
        "torch",
    ],
    "data": [
        "datasets",
        "interdomain.folders",
        "numpy",
        "pyarrow",
        "sentencepiece",
        "tiktoken",
        "tokenizers",
        "torch",
        "zstandard",
    ],
    "environment": ["torch"],
    "features": ["interdomain.scan", "torch", "triton"],
    "folders": [],
    "hf": [
        "interdomain.checkpoint",
        "interdomain.features",
        "interdomain.model",
        "interdomain.scan",
        "torch",
        "transformers",
    ],
    "launcher": [],
    "markdown": [],
    "megatron": [
        "interdomain",
        "interdomain.checkpoint",
        "interdomain.data",
        "interdomain.features",
        "interdomain.folders",
        "interdomain.model",
        "interdomain.removed",
        "interdomain.scan",
        "megatron",
        "torch",
    ],
    "model": ["interdomain.features", "interdomain.scan", "numpy", "torch"],
    "patches": ["tensorboard", "torch"],
    "removed": [],
    "scan": ["torch", "triton"],
    "titan": [
        "interdomain",
        "interdomain.checkpoint",
        "interdomain.data",
        "interdomain.environment",
        "interdomain.features",
        "interdomain.folders",
        "interdomain.launcher",
        "interdomain.markdown",
        "interdomain.model",
        "interdomain.patches",
        "interdomain.removed",
        "interdomain.scan",
        "numpy",
        "tensorboard",
        "torch",
        "torchdata",
        "torchtitan",
        "tqdm",
        "tyro",
        "wandb",
    ],
    "tools": [
        "datasets",
        "fla",
        "interdomain",
        "interdomain.checkpoint",
        "interdomain.data",
        "interdomain.environment",
        "interdomain.features",
        "interdomain.folders",
        "interdomain.hf",
        "interdomain.launcher",
        "interdomain.markdown",
        "interdomain.megatron",
        "interdomain.model",
        "interdomain.removed",
        "interdomain.scan",
        "interdomain.titan",
        "lm_eval",
        "mamba_ssm",
        "matplotlib",
        "numpy",
        "safetensors",
        "sentencepiece",
        "tensorboard",
        "torch",
        "tqdm",
        "triton",
    ],
    "vllm": [
        "interdomain.checkpoint",
        "interdomain.features",
        "interdomain.hf",
        "interdomain.model",
        "torch",
        "transformers",
        "vllm",
    ],
}
NETWORK = {
    *("aiohttp", "asyncio", "boto3", "fsspec", "ftplib", "http", "httpx", "huggingface_hub"),
    *("requests", "smtplib", "socket", "ssl", "urllib", "urllib3", "webbrowser", "xmlrpc"),
}


def imports_of(module):
    """Returns the absolute names of all that a module imports, wherever in it, relative and by string included."""
    path = MODULES[module]
    base = module.split(".")
    if path.stem != "__init__":
        base.pop()
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = []
            if node.level:
                start = base[: len(base) - node.level + 1]
            if node.module:
                start = [*start, node.module]
            found |= {".".join([*start, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Call):
            # importlib.import_module("name") and __import__("name")
            call = re.fullmatch(r"(?:.*\bimport_module|__import__)\('(.*)'\)", ast.unparse(node))
            if call:
                found.add(call[1])
    return found


def package_of(name):
    """Returns interdomain.scan, interdomain.model, ... for ours, `torch`, `os` for others', `interdomain` for its top."""
    parts = name.split(".")
    if parts[0] == "interdomain" and parts[1:] and parts[1] in ALLOWED:
        return ".".join(parts[:2])
    return parts[0]


def test_imports_go_one_way():
    packages = {package_of(module) for module in MODULES}
    assert packages == {"interdomain"}.union(f"interdomain.{name}" for name in ALLOWED)
    for module in MODULES:
        package = package_of(module)
        allowed = ["interdomain.model"]  # for `interdomain` itself, when a name is asked for
        if package != "interdomain":
            allowed = ALLOWED[package.removeprefix("interdomain.")]
        for name in imports_of(module):
            target = package_of(name)
            statement = f"{module} imports {name}"
            assert target not in NETWORK, f"{statement}: nothing speaks to a network"
            if target == "torchtitan":
                assert module.startswith("interdomain.titan.host"), statement
            if target != package and target not in sys.stdlib_module_names:
                assert target in allowed, f"{statement}; {package} may import {allowed}"


def unit_of(name):
    """Returns interdomain.titan.plan for all of its modules. A module that lies beside the folders is its own unit."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    parts = name.split(".")
    return ".".join(parts[:3]) if len(parts) > 2 else None


def test_folders_of_a_package_import_each_other_one_way():
    """Inside titan, model, tools and the others no folder or module imports what imports it."""
    graph = {}
    for module in MODULES:
        unit = unit_of(module)
        imported = {unit_of(name) for name in imports_of(module)}
        graph.setdefault(unit, set()).update(imported - {None, unit})
    del graph[None]
    assert len(graph) > 80
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the modules


# What the package changes in others' modules, and which private names of PyTorch it reads

PATCHES = {"patches.py", "titan/host/patches.py", "megatron/patches.py"}
PUBLIC_SETTINGS = "torch.compiler.config."


def other_projects_names(tree):
    """Returns {name in a module: full name} of what the module imports from other projects."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    own = {"interdomain", *sys.stdlib_module_names}
    return {name: full for name, full in found.items() if full.partition(".")[0] not in own}


def changed_and_read(tree):
    """Returns the full names of other projects' attributes that a module sets or deletes, and of all that it reads."""
    names = other_projects_names(tree)
    changed = set()
    read = set(names.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name, dot, rest = ast.unparse(node).partition(".")
            uses = read if isinstance(node.ctx, ast.Load) else changed
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "setattr",
            "delattr",
            "vars",
        ):
            name, dot, rest = ast.unparse(node.args[0]).partition(".")
            uses = changed
        else:
            continue
        if name in names:
            uses.add(names[name] + dot + rest)
    return changed, read


def test_other_projects_are_changed_in_the_patches_files_alone():
    """The private names of PyTorch that the other files read are a list with reasons."""
    private = set()
    for module, path in MODULES.items():
        assert not re.search("unittest", " ".join(imports_of(module))), module
        # The tools are programs: what they change ends with their process.
        is_patches = str(path.relative_to(PLUGIN / "interdomain")) in PATCHES
        if is_patches or module.startswith("interdomain.tools."):
            continue
        changed, read = changed_and_read(ast.parse(path.read_text()))
        assert [name for name in changed if not name.startswith(PUBLIC_SETTINGS)] == [], module
        for name in read:
            if re.match(r"torch\..*\b_[a-z]", name, re.IGNORECASE) and not name.endswith("_C"):
                private.add(name)
    listed = tuple(patches.PRIVATE_NAMES)
    assert [name for name in private if not name.startswith(listed)] == []
    for entry in listed:
        assert any(name.startswith(entry) for name in private), f"nothing reads {entry}"


# What the package holds


def test_kernels_is_no_package():
    """transformers imports the Hugging Face package `kernels`. Ours would shadow it if the repository is on sys.path."""
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()


def test_every_package_folder_is_a_package():
    """Without __init__.py, names such as `interdomain.titan.plan` would be namespaces that any folder could extend."""
    for path in MODULES.values():
        assert (path.parent / "__init__.py").is_file()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution and the wheel made from it, unpacked. A copy is built: setuptools leaves its traces there."""
    path = tmp_path_factory.mktemp("built")
    source = path / "source"
    for file in files():
        copy = source / file.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    for link in (PLUGIN / "interdomain").iterdir():
        if link.is_symlink():
            (source / link.relative_to(REPOSITORY)).symlink_to(os.readlink(link))

    def build(*words):
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    build("-c", f"import setuptools.build_meta as build; build.build_sdist({str(path)!r})")
    (sdist,) = path.glob("*.tar.gz")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    build("-m", "pip", "wheel", *options, "--wheel-dir", path, sdist)
    (wheel,) = path.glob("*.whl")
    shutil.unpack_archive(sdist, path / "sdist")
    shutil.unpack_archive(wheel, path / "wheel", "zip")
    return path / "sdist" / sdist.name.removesuffix(".tar.gz"), path / "wheel"


@pytest.fixture(scope="module")
def wheel(built):
    return built[1]


def relative_paths(folder, pattern):
    return {str(path.relative_to(folder)) for path in folder.rglob(pattern)}


def test_the_source_distribution_holds_every_file(built):
    assert {str(path.relative_to(REPOSITORY)) for path in files()} <= relative_paths(built[0], "*")


def test_the_wheel_holds_every_module(wheel):
    modules = {str(path.relative_to(PLUGIN)) for path in MODULES.values()}
    assert relative_paths(wheel, "*.py") == modules
    sites = REPOSITORY / "tools" / "sites"
    assert relative_paths(sites, "*") == relative_paths(wheel / "interdomain/tools/sites", "*")
    assert (wheel / "interdomain/data/debian.toml").is_file()
    assert (wheel / "interdomain/megatron/settings.toml").is_file()
    (info,) = wheel.glob("*.dist-info")
    assert (info / "licenses/LICENSE").is_file()
    assert "interdomain = interdomain.tools.main:main" in (info / "entry_points.txt").read_text()
    metadata = (info / "METADATA").read_text()
    assert "# Interdomain Attention" in metadata
    lines = re.findall(r"^Requires-Dist: (.*)", metadata, re.MULTILINE)
    needed = {Requirement(line) for line in lines}
    assert needed >= {Requirement(line) for line in PYPROJECT["project"]["dependencies"]}
    # The package index shows the README, where relative links lead nowhere.
    for link, attribute in re.findall(r"\]\(([^)]*)\)|(?:src|srcset|href)=\"([^\"]*)\"", metadata):
        assert (link or attribute).startswith("https://")


def python(code, cwd, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Each command is a fork of one process that has imported what they need.
FORKS = """
import os, runpy, sys, {imported}
sys.modules.update(dict.fromkeys({without!r}))  # imports fail, find_spec finds nothing
for i, line in enumerate({lines!r}):
    if not os.fork():
        for stream in (1, 2):
            os.dup2(os.open(f"{log}/{{i}}.{{stream}}", os.O_CREAT | os.O_WRONLY), stream)
        module, *sys.argv[1:] = line.split()
        runpy.run_module("interdomain.tools." + module, run_name="__main__", alter_sys=True)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def run_tools(lines, cwd, wheel, imported, without=()):
    """Runs `python -m interdomain.tools.LINE` for each line from the wheel, as if the packages `without` were missing.

    Returns:
        A list of (exit status, output, errors).
    """
    log = Path(tempfile.mkdtemp(dir=wheel.parent))
    code = FORKS.format(lines=lines, log=log, imported=imported, without=sorted(without))
    ends = []
    for i, status in enumerate(python(code, cwd, PYTHONPATH=str(wheel)).split()):
        ends.append((int(status), (log / f"{i}.1").read_text(), (log / f"{i}.2").read_text()))
    assert len(ends) == len(lines)
    return ends


def test_commands_find_the_wheel_s_train_configs(wheel, tmp_path):
    """They are started in an empty folder, and leave it empty."""
    lines = ["main launch --dry-run", "study plan train_configs/studies/small.toml"]
    launch, study = run_tools(lines, tmp_path, wheel, "interdomain.titan.settings.job_config")
    assert launch[0] == 0, launch[2]
    assert "data/stdlib, which the run prepares first" in launch[1]
    assert study[0] == 0, study[2]
    assert " missing: " in study[1]
    assert list(tmp_path.iterdir()) == []


LACKING = {
    "main launch": ("tyro", "train"),
    "main study plan train_configs/studies/small.toml": ("torchtitan", "train"),
    "evaluate folder --tasks mmlu": ("lm_eval", "eval"),
    "prepare_data --input x.parquet --output out --tokenizer tokenizer.json": (
        "tokenizers",
        "data",
    ),
}


def test_a_command_names_the_extra_that_it_lacks(wheel, tmp_path):
    """It does so in one line if only the wheel's own dependencies are installed."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "x.parquet").touch()
    without = set().union(*_cli.EXTRAS.values())
    ends = run_tools(list(LACKING), tmp_path, wheel, "torch", without)
    for (status, out, err), (module, extra) in zip(ends, LACKING.values(), strict=True):
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert module in err
        assert f"-m pip install 'interdomain[{extra}]'" in err


# A child in which a socket or a warning of ours is an error. Others' imports come first: their warnings are theirs.
STRICT = """
import importlib, socket, sys, warnings
class NoNetwork(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket was opened")
socket.socket = NoNetwork
socket.create_connection = socket.getaddrinfo = None
import numpy, safetensors.torch, sentencepiece, torch, torch.distributed.checkpoint, torch.distributed.tensor, tqdm
for name in {theirs!r}:
    importlib.import_module(name)
warnings.simplefilter("error")
for name in {ours!r}:
    importlib.import_module(name)
"""
# Megatron warns in our modules, too. vLLM and TorchTitan 0.3.0 are installed elsewhere.
NOT_IMPORTED = [
    "interdomain.megatron",
    "interdomain.vllm",
    "interdomain.titan.spec_0_3",
    "interdomain.titan.entry_0_3",
    "interdomain.titan.host.titan_0_3",
]


def test_imports_are_silent_and_open_no_socket(tmp_path):
    """A run imports the plugin before the trainer. Here it is imported after it, so that what warns is ours."""
    missing = list(NOT_IMPORTED)
    theirs = []
    for package, host in (("hf", "transformers"), ("titan", "torchtitan")):
        if importlib.util.find_spec(host) is None:
            missing.append(f"interdomain.{package}")
        else:
            theirs.append("torchtitan.train" if host == "torchtitan" else host)
    ours = [name for name in MODULES if not name.startswith(tuple(missing))]
    python(STRICT.format(theirs=theirs, ours=ours), tmp_path)


# What stands in the files


def test_no_file_is_too_long():
    for path in files(".py", ".sh", ".toml", ".md"):
        assert len(path.read_text().splitlines()) <= MAX_LINES, path


MACHINE_PATH = re.compile(
    r"^.*(?<![\w.~<>})/])/(?:home|root|work|Users|mnt|scratch|lustre|tmp|opt|var|srv)/\w.*",
    re.MULTILINE,
)


def test_no_file_names_a_machine_s_paths():
    for path in files():
        assert MACHINE_PATH.findall(path.read_text(errors="ignore")) == [], path


# The tools

TOOLS = [name for name in MODULES if name.startswith("interdomain.tools.") and "._" not in name]
COMMANDS = {f"interdomain.tools.{file.stem}": name for name, file in main.TOOLS.items()}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_s_first_line_can_be_pasted(tool):
    """The docstring opens with it. argparse, which ends the process at an unknown option, accepts it and all examples."""
    tree = ast.parse(MODULES[tool].read_text())
    first, blank, *rest = ast.get_docstring(tree, clean=False).split("\n")
    assert first.startswith(f"interdomain {COMMANDS.get(tool, '')}")
    assert blank == ""
    examples = [line for line in rest if line.startswith("    ") and "interdomain " in line]
    for example in (first, *examples):
        command, *arguments = shlex.split(example.partition("interdomain ")[2])
        module = importlib.import_module(f"interdomain.tools.{main.TOOLS[command].stem}")
        module.parse(arguments)


def test_every_tool_is_a_command_with_help(capsys, monkeypatch):
    assert {*COMMANDS, "interdomain.tools.main"} == set(TOOLS)
    assert PYPROJECT["project"]["scripts"] == {"interdomain": "interdomain.tools.main:main"}
    monkeypatch.setattr(sys, "argv", ["interdomain"])
    for command in COMMANDS.values():
        with pytest.raises(SystemExit) as ended:
            main.main([command, "--help"])
        assert not ended.value.code
        shown = capsys.readouterr().out
        program = "./launch.sh" if command == "launch" else f"interdomain {command}"
        assert shown.startswith(f"usage: {program} ")
        (page,) = re.findall(r"^Documentation: (docs/[\w-]+\.md)", shown, re.MULTILINE)
        assert (REPOSITORY / page).is_file()


def test_the_list_of_commands_imports_nothing_heavy(tmp_path):
    code = "import sys; from interdomain.tools import main; main.main([]); print(*sys.modules)"
    *listed, modules = python(code, tmp_path).splitlines()
    rows = [" ".join(line.split()) for line in listed]
    for name, file in main.TOOLS.items():
        assert " ".join([name, *main.summary(file).split()]) in rows
    assert not {"torch", "numpy", "torchtitan"} & set(modules.split())


def test_an_unknown_command(capsys):
    assert main.main(["prepar"]) == 2
    assert "there is no command 'prepar'" in capsys.readouterr().err


def use_removed(name):
    """Uses a removed command, setting or flag as a user does. Returns the pattern of this use in the repository's files."""
    pattern = re.escape(name).replace(r"\ ", r"[^\n]* ")
    if name.startswith("--"):
        assert main.main(["launch", name]) == 2
        return rf"launch\.sh[^\n]* {pattern}\b"
    if "." in name:
        setting, _, value = name.partition(" = ")
        assert main.main(["launch", f"--{setting}={value or 1}"]) == 2
        return pattern
    assert main.main(name.split()) == 2
    return rf"interdomain {pattern}\b"


def test_removed_names_are_answered_and_stand_nowhere_else(capsys):
    """A user is told what to do instead, by the sentence that the changelog has."""
    changelog = " ".join((REPOSITORY / "CHANGELOG.md").read_text().split())
    others = {}
    for path in files(".py", ".sh", ".toml", ".md"):
        if path.name not in ("CHANGELOG.md", "removed.py"):
            others[path] = path.read_text()
    for name, instead in REMOVED.items():
        assert f"`{name}`" in changelog
        assert instead in changelog
        if name.startswith("interdomain."):
            pattern = re.escape(name)
            with pytest.raises(SystemExit, match=re.escape(instead)):
                runpy.run_module(name, run_name="__main__")
        else:
            pattern = use_removed(name)
            assert instead in capsys.readouterr().err
        for path, text in others.items():
            assert not re.search(pattern, text), f"{path} names {name}"


def pinned_versions(file):
    text = (REPOSITORY / file).read_text()
    pins = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}


def test_hashed_constraints_are_the_constraints():
    """Every version in constraints-hashed.txt that constraints.txt pins is the same there."""
    pinned = pinned_versions("constraints.txt")
    hashed = pinned_versions("constraints-hashed.txt")
    both = pinned.keys() & hashed.keys()
    assert len(both) > 50
    for name in both:
        assert hashed[name] == pinned[name], name
