"""The repository as a package: which package imports what, what the wheel holds, the commands."""

import ast
import functools
import graphlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import interdomain
from interdomain import patches
from interdomain.removed import REMOVED
from interdomain.tools import _cli, main

from .common import REPOSITORY

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PLUGIN = REPOSITORY / "plugin"


def files(*endings):
    """Returns every file that is or may become a part of the repository and has one of the endings."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.check_output(command, cwd=REPOSITORY, text=True)
    paths = [REPOSITORY / name for name in listed.split("\0") if name.endswith(endings or ("",))]
    return [path for path in paths if path.is_file()]


def package_files():
    """Returns {path inside plugin: file}. The package's links lead to kernels/scan, kernels/features and tools."""
    found = {}
    for folder, _, names in os.walk(PLUGIN / "interdomain", followlinks=True):
        for name in names:
            path = Path(folder, name)
            if path.parent.name != "__pycache__":
                found[str(path.relative_to(PLUGIN))] = path
    return dict(sorted(found.items()))


PACKAGE_FILES = package_files()
MODULES = {}  # import name: file
for relative, path in PACKAGE_FILES.items():
    if path.suffix == ".py":
        name = relative.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        MODULES[name] = path


# Which package imports what

# Each of our packages, and those that it may import besides the standard library and itself. A name that begins with a dot
# is in `interdomain`.
IMPORTS = """
checkpoint  .data .folders .markdown .model .patches jinja2 numpy safetensors tensorboard torch
data        .folders datasets numpy pyarrow sentencepiece tiktoken tokenizers torch zstandard
environment torch
features    .scan torch triton
folders
hf          .checkpoint .features .model .scan torch transformers
launcher
markdown
megatron    interdomain .checkpoint .data .features .folders .model .removed .scan megatron \
            torch
model       .features .scan numpy torch
patches     tensorboard torch
removed
scan        torch triton
titan       interdomain .checkpoint .data .environment .features .folders .launcher .markdown \
            .model .patches .removed .scan numpy tensorboard torch torchdata torchtitan tqdm \
            tyro wandb
tools       interdomain .checkpoint .data .environment .features .folders .hf .launcher \
            .markdown .megatron .model .removed .scan .titan datasets fla lm_eval mamba_ssm \
            matplotlib numpy safetensors sentencepiece tensorboard torch tqdm triton
vllm        .checkpoint .features .hf .model torch transformers vllm
"""
ALLOWED = {}
for line in IMPORTS.strip().splitlines():
    package, *names = line.split()
    ALLOWED[package] = [f"interdomain{name}" if name[0] == "." else name for name in names]
NETWORK = (
    "aiohttp asyncio boto3 fsspec ftplib http httpx huggingface_hub requests smtplib socket ssl urllib urllib3 "
    "webbrowser xmlrpc"
)


@functools.cache
def imports_of(module):
    """Returns the absolute names of all that a module imports, wherever in it, relative and by string included."""
    path = MODULES[module]
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    text = path.read_text()
    found = set(re.findall(r"(?:import_module|__import__)\(\"([\w.]+)\"", text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            source = importlib.util.resolve_name(source, package)
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


def package_of(name):
    """Returns interdomain.scan, interdomain.model, ... for ours, `torch`, `os` for others', `interdomain` for its top."""
    first, *rest = name.split(".")
    if first == "interdomain" and rest and rest[0] in ALLOWED:
        return f"interdomain.{rest[0]}"
    return first


def test_imports_go_one_way():
    packages = {package_of(module) for module in MODULES}
    assert packages == {"interdomain"}.union(f"interdomain.{name}" for name in ALLOWED)
    for module in MODULES:
        package = package_of(module)
        # `interdomain` itself imports the model when a name is asked for.
        allowed = ALLOWED.get(package.removeprefix("interdomain."), ["interdomain.model"])
        for name in imports_of(module):
            target = package_of(name)
            statement = f"{module} imports {name}"
            assert target not in NETWORK.split(), f"{statement}: nothing speaks to a network"
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

PATCHES = ("interdomain.patches", "interdomain.titan.host.patches", "interdomain.megatron.patches")
# A public setting of PyTorch, and the words of our own process.
CHANGES = ("torch.compiler.config.cache_key_tag", "sys.argv")


def attributes_of_others(module):
    """Yields the full name of each attribute of an imported module that a module uses, and the class of its ast context."""
    tree = ast.parse(MODULES[module].read_text())
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            source = ""
        elif isinstance(node, ast.ImportFrom) and not node.level:
            source = f"{node.module}."
        else:
            continue
        for alias in node.names:
            names[alias.asname or alias.name] = source + alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in names:
                yield f"{names[first]}.{rest}", type(node.ctx)


def test_other_projects_are_changed_in_the_patches_files_alone():
    """The private names of PyTorch that the other files read are a list with reasons."""
    private = set()
    for module in MODULES:
        assert "unittest" not in " ".join(imports_of(module)), module
        # The tools are programs: what they change ends with their process.
        if module in PATCHES or module.startswith("interdomain.tools."):
            continue
        read = set(imports_of(module))
        for name, context in attributes_of_others(module):
            if context is ast.Load:
                read.add(name)
            else:
                assert name in CHANGES, f"{module} changes {name}"
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
    source.mkdir()
    # With the links, which files() leaves out.
    copy = f"git ls-files -co --exclude-standard -z | xargs -0 cp --parents -P -t {source}"
    subprocess.run(copy, shell=True, cwd=REPOSITORY, check=True)
    build = "import setuptools.build_meta as build; build.build_{}({!r})"
    run_python("-c", build.format("sdist", str(path)), cwd=source)
    (sdist,) = path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, path)
    unpacked = path / sdist.name.removesuffix(".tar.gz")
    run_python("-c", build.format("wheel", str(path)), cwd=unpacked)
    (wheel,) = path.glob("*.whl")
    shutil.unpack_archive(wheel, path / "wheel", "zip")
    return unpacked, path / "wheel"


@pytest.fixture(scope="module")
def wheel(built):
    return built[1]


def relative_paths(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_source_distribution_holds_every_file(built):
    assert {str(path.relative_to(REPOSITORY)) for path in files()} <= relative_paths(built[0])


def test_the_wheel_holds_every_file_of_the_package(wheel):
    (info,) = wheel.glob("*.dist-info")
    assert {name for name in relative_paths(wheel) if "dist-info" not in name} == set(PACKAGE_FILES)
    assert (info / "licenses/LICENSE").is_file()
    metadata = (info / "METADATA").read_text()
    assert "# Interdomain Attention" in metadata
    lines = re.findall(r"^Requires-Dist: (.*)", metadata, re.MULTILINE)
    needed = {Requirement(line) for line in lines}
    assert needed >= {Requirement(line) for line in PYPROJECT["project"]["dependencies"]}
    # The package index shows the README, where relative links lead nowhere.
    for link in re.findall(r"(?:\]\(|(?:src|srcset|href)=\")([^)\"]*)", metadata):
        assert link.startswith("https://"), link


def run_python(*arguments, cwd, **environment):
    """Returns the output of Python, which must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Each command is a fork of one process that has imported what they need.
FORKS = """
import json, os, runpy, sys, tempfile, {imported}
sys.modules.update(dict.fromkeys({without!r}))  # imports fail, find_spec finds nothing
ends = []
for line in {lines!r}:
    streams = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    if not os.fork():
        for number, stream in enumerate(streams, 1):
            os.dup2(stream.fileno(), number)
        module, *sys.argv[1:] = line.split()
        runpy.run_module("interdomain.tools." + module, run_name="__main__", alter_sys=True)
        sys.exit()
    status = os.waitstatus_to_exitcode(os.wait()[1])
    output, errors = [os.pread(stream.fileno(), 10**6, 0).decode() for stream in streams]
    ends.append((status, output, errors))
print(json.dumps(ends))
"""


def run_tools(lines, cwd, wheel, imported, without=()):
    """Runs `python -m interdomain.tools.LINE` for each line from the wheel, as if the packages `without` were missing.

    Returns:
        A list of [exit status, output, errors].
    """
    code = FORKS.format(lines=lines, imported=imported, without=sorted(without))
    return json.loads(run_python("-c", code, cwd=cwd, PYTHONPATH=str(wheel)))


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
    run_python("-c", STRICT.format(theirs=theirs, ours=ours), cwd=tmp_path)


# What stands in the files


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
def test_a_tool_s_examples_can_be_pasted(tool):
    """The docstring opens with one. argparse, which ends the process at an unknown option, accepts all."""
    docstring = ast.get_docstring(ast.parse(MODULES[tool].read_text()), clean=False)
    assert docstring.startswith(f"interdomain {COMMANDS.get(tool, '')}")
    for example in re.findall(r"^(?:    .*?)?interdomain (.*)", docstring, re.MULTILINE):
        command, *arguments = shlex.split(example)
        module = importlib.import_module(f"interdomain.tools.{main.TOOLS[command].stem}")
        module.parse(arguments)


def test_every_tool_is_a_command_with_help(capsys):
    assert {*COMMANDS, "interdomain.tools.main"} == set(TOOLS)
    assert PYPROJECT["project"]["scripts"] == {"interdomain": "interdomain.tools.main:main"}
    assert main.main([]) == 0
    listed = capsys.readouterr().out
    for command in COMMANDS.values():
        assert f"\n  {command} " in listed
        with pytest.raises(SystemExit) as ended:
            main.main([command, "--help"])
        assert not ended.value.code
        shown = capsys.readouterr().out
        (page,) = re.findall(r"^Documentation: (docs/[\w-]+\.md)", shown, re.MULTILINE)
        assert (REPOSITORY / page).is_file()


def test_an_unknown_command(capsys):
    assert main.main(["prepar"]) == 2
    assert "there is no command 'prepar'" in capsys.readouterr().err


def test_removed_names_are_answered(capsys):
    """A user is told what to do instead, as the changelog does. Removed settings and modules stand nowhere else."""
    changelog = " ".join((REPOSITORY / "CHANGELOG.md").read_text().split())
    ledgers = ("CHANGELOG.md", "removed.py")
    paths = [path for path in files(".py", ".sh", ".toml", ".md") if path.name not in ledgers]
    others = "\n".join(path.read_text() for path in paths)
    for name, instead in REMOVED.items():
        assert f"`{name}`" in changelog
        assert instead in changelog
        assert "." not in name or name not in others, name
        if name.startswith("interdomain."):
            with pytest.raises(SystemExit, match=re.escape(instead)):
                runpy.run_module(name, run_name="__main__")
            continue
        words = name.split()
        if name.startswith("--"):
            words = ["launch", name]
        elif "." in name:
            setting, _, value = name.partition(" = ")
            words = ["launch", f"--{setting}={value or 1}"]
        assert main.main(words) == 2
        assert instead in capsys.readouterr().err


def test_the_version_is_the_same_everywhere():
    (cited,) = re.findall(r"^version: (.*)", (REPOSITORY / "CITATION.cff").read_text(), re.M)
    assert PYPROJECT["project"]["version"] == interdomain.__version__ == cited


def pinned_versions(file):
    text = (REPOSITORY / file).read_text()
    pins = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


def test_hashed_constraints_are_the_constraints():
    """Every version in constraints-hashed.txt that constraints.txt pins is the same there."""
    pinned = pinned_versions("constraints.txt")
    hashed = pinned_versions("constraints-hashed.txt")
    both = pinned.keys() & hashed.keys()
    assert len(both) > 50
    for name in both:
        assert hashed[name] == pinned[name], name
