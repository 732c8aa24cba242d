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
MAX_LINES = 800


def files(*endings):
    """Every file that is or may become a part of the repository, with one of the endings."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPOSITORY, text=True
    )
    found = [REPOSITORY / name for name in listed.split("\0") if name]
    return sorted(p for p in found if p.is_file() and p.name.endswith(endings or ("",)))


def modules():
    """Import name -> file. The package's links lead to kernels/scan, kernels/features and tools."""
    for folder, folders, names in os.walk(PLUGIN / "interdomain", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                yield (
                    ".".join(path.relative_to(PLUGIN).with_suffix("").parts).removesuffix(
                        ".__init__"
                    ),
                    path,
                )


MODULES = dict(sorted(modules()))


# Which package imports what


def imports_of(source, module, is_package):
    """Absolute names of everything that a module's source imports, wherever in it, relative and by string included."""
    base = module.split(".") if is_package else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(base[: len(base) - node.level + 1]) if node.level else ""
            start = ".".join(part for part in (start, node.module) if part)
            found |= {f"{start}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if called in ("import_module", "__import__"):
                found.add(str(node.args[0].value))
    return found


def package_of(name):
    """interdomain.scan, interdomain.model, ... for ours; `torch`, `os` for others'; `interdomain` for its top."""
    parts = name.split(".")
    if parts[0] != "interdomain":
        return parts[0]
    return f"interdomain.{parts[1]}" if len(parts) > 1 and parts[1] in ALLOWED else "interdomain"


ALLOWED = {
    "folders": set(),
    "launcher": set(),
    "markdown": set(),
    "patches": {"torch", "tensorboard"},
    "removed": set(),
    "environment": {"torch"},
    "scan": {"torch", "triton"},
    "features": {"torch", "triton", "interdomain.scan"},
    "data": {
        *("numpy", "sentencepiece", "torch", "interdomain.folders"),
        *(
            "pyarrow",
            "zstandard",
            "datasets",
            "tokenizers",
            "tiktoken",
        ),  # late, where a file needs them
    },
    "model": {"torch", "numpy", "interdomain.scan", "interdomain.features"},
    "checkpoint": {
        *(
            "torch",
            "safetensors",
            "numpy",
            "interdomain.model",
            "interdomain.data",
            "interdomain.folders",
        ),
        *("interdomain.markdown", "interdomain.patches"),
        "tensorboard",  # late: what writes event files
        "jinja2",  # the model card
    },
    "hf": {
        *("torch", "transformers", "interdomain.scan", "interdomain.features", "interdomain.model"),
        "interdomain.checkpoint",  # what a saved folder holds
    },
    "titan": {
        "wandb",  # late: where metrics.enable_wandb asks for it
        *(
            "torch",
            "numpy",
            "torchtitan",
            "torchdata",
            "tensorboard",
            "tqdm",
            "tyro",
            "interdomain",
        ),
        *(
            "interdomain.scan",
            "interdomain.features",
            "interdomain.data",
            "interdomain.folders",
            "interdomain.model",
        ),
        *(
            "interdomain.environment",
            "interdomain.checkpoint",
            "interdomain.launcher",
            "interdomain.markdown",
        ),
        *("interdomain.removed", "interdomain.patches"),
    },
    "megatron": {
        *(
            "torch",
            "megatron",
            "interdomain",
            "interdomain.scan",
            "interdomain.features",
            "interdomain.data",
        ),
        *(
            "interdomain.model",
            "interdomain.checkpoint",
            "interdomain.folders",
            "interdomain.removed",
        ),
    },
    "vllm": {
        *(
            "torch",
            "transformers",
            "vllm",
            "interdomain.features",
            "interdomain.model",
            "interdomain.checkpoint",
            "interdomain.hf",
        ),
    },
    "tools": {
        *(
            "torch",
            "numpy",
            "sentencepiece",
            "safetensors",
            "tqdm",
            "tensorboard",
            "interdomain",
            "interdomain.scan",
        ),
        *("interdomain.features", "interdomain.data", "interdomain.folders", "interdomain.model"),
        *("interdomain.titan", "interdomain.megatron", "interdomain.hf", "interdomain.environment"),
        *("interdomain.checkpoint", "interdomain.launcher", "interdomain.markdown"),
        *("fla", "mamba_ssm"),  # timed beside ours where they are installed
        "triton",  # which ptxas compiled what was measured
        *("lm_eval", "datasets", "matplotlib"),  # late: what `evaluate` and plots need
        "interdomain.removed",
    },
}
NETWORK = {
    *("socket", "ssl", "http", "urllib", "ftplib", "smtplib", "xmlrpc", "asyncio", "webbrowser"),
    *("requests", "httpx", "aiohttp", "urllib3", "huggingface_hub", "boto3", "fsspec"),
}


def test_imports_go_one_way():
    assert {package_of(module) for module in MODULES} >= {f"interdomain.{name}" for name in ALLOWED}
    for module, path in MODULES.items():
        own = package_of(module)
        allowed = (
            ALLOWED[own.partition(".")[2]] if own != "interdomain" else {"interdomain.model"}
        )  # late
        for name in sorted(imports_of(path.read_text(), module, path.stem == "__init__")):
            target = package_of(name)
            assert target not in NETWORK, f"{module} imports {name}: nothing speaks to a network"
            host = module.startswith("interdomain.titan.host")
            assert target != "torchtitan" or host, (
                f"{module} imports {name}: only plugin/interdomain/titan/host does"
            )
            assert target in allowed | {own} or target in sys.stdlib_module_names, (
                f"{module} imports {name}; {own} may import {', '.join(sorted(allowed)) or 'the standard library'}"
            )


def test_folders_of_a_package_import_each_other_one_way():
    """Inside titan, model, tools and the others: no folder or module imports what imports it."""

    def unit(name):
        """interdomain.titan.plan for all of its modules; a module that lies beside the folders is its own unit."""
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        parts = name.split(".")
        return ".".join(parts[:3]) if len(parts) > 2 else None

    graph = {}
    for module, path in MODULES.items():
        imports = {
            unit(name) for name in imports_of(path.read_text(), module, path.stem == "__init__")
        }
        if this := unit(module):
            graph.setdefault(this, set()).update(imports - {None, this})
    assert len(graph) > 80
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the modules


# What the package changes in others' modules, and which private names of PyTorch it reads

PATCHES = {"patches.py", "titan/host/patches.py", "megatron/patches.py"}
PUBLIC_SETTINGS = "torch.compiler.config."


def other_projects_names(tree):
    """{name in a module: full name}, of what a module imports from other projects."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found |= {alias.asname: alias.name} if alias.asname else {top: top}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    own = {"interdomain", *sys.stdlib_module_names}
    return {name: full for name, full in found.items() if full.partition(".")[0] not in own}


def changed_and_read(tree):
    """Full names of other projects' attributes that a module sets or deletes, and of all that it reads."""
    names = other_projects_names(tree)
    changed, read = set(), {*names.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name, dot, rest = ast.unparse(node).partition(".")
            if name in names:
                (read if isinstance(node.ctx, ast.Load) else changed).add(names[name] + dot + rest)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "setattr",
            "delattr",
            "vars",
        ):
            name, dot, rest = ast.unparse(node.args[0]).partition(".")
            if name in names:
                changed.add(names[name] + dot + rest)
    return changed, read


def test_other_projects_are_changed_in_the_patches_files_alone():
    """The private names of PyTorch that the other files read are a list with reasons."""
    private = set()
    for name, path in MODULES.items():
        assert not any(
            full.startswith("unittest") for full in imports_of(path.read_text(), name, False)
        ), name
        if name.startswith("interdomain.tools."):  # programs, which end with their process
            continue
        changed, read = changed_and_read(ast.parse(path.read_text()))
        if str(path.relative_to(PLUGIN / "interdomain")) not in PATCHES:
            assert not {full for full in changed if not full.startswith(PUBLIC_SETTINGS)}, name
            private |= {
                full for full in read if re.match(r"torch\..*\b_[a-z]", full, re.IGNORECASE)
            }
    private = {full for full in private if not full.endswith("_C")}
    unlisted = {full for full in private if not full.startswith(tuple(patches.PRIVATE_NAMES))}
    assert not unlisted
    unread = {
        listed
        for listed in patches.PRIVATE_NAMES
        if not any(full.startswith(listed) for full in private)
    }
    assert not unread


# What the package holds


def test_kernels_is_no_package():
    """transformers imports the Hugging Face package `kernels`; ours would shadow it where the repository is on sys.path."""
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()


def test_every_package_folder_is_a_package():
    """Without __init__.py, names such as `interdomain.titan.plan` would be namespaces that any folder could extend."""
    assert {
        path.parent for path in MODULES.values() if not (path.parent / "__init__.py").is_file()
    } == set()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(source distribution, the wheel made from it), unpacked. Of a copy: setuptools leaves its traces in the source."""
    path = tmp_path_factory.mktemp("built")
    for file in files():
        copy = path / "source" / file.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    for link in (link for link in (PLUGIN / "interdomain").iterdir() if link.is_symlink()):
        (path / "source" / link.relative_to(REPOSITORY)).symlink_to(os.readlink(link))

    def build(*words):
        done = subprocess.run(
            [sys.executable, *words], cwd=path / "source", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    build(
        "-c", f"import setuptools.build_meta as setuptools; setuptools.build_sdist({str(path)!r})"
    )
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


def test_the_source_distribution_holds_every_file(built):
    held = {path.relative_to(built[0]) for path in built[0].rglob("*")}
    assert {path.relative_to(REPOSITORY) for path in files()} <= held


def test_the_wheel_holds_every_module(wheel):
    found = {str(p.relative_to(wheel)) for p in wheel.rglob("*.py")}
    wanted = {
        module.replace(".", "/") + ("/__init__.py" if path.stem == "__init__" else ".py")
        for module, path in MODULES.items()
    }
    assert found == wanted
    sites = {path.name for path in (REPOSITORY / "tools" / "sites").iterdir()}
    assert sites == {path.name for path in (wheel / "interdomain" / "tools" / "sites").iterdir()}
    assert (wheel / "interdomain" / "data" / "debian.toml").is_file()
    assert (wheel / "interdomain" / "megatron" / "settings.toml").is_file()
    (info,) = wheel.glob("*.dist-info")
    assert (info / "licenses" / "LICENSE").is_file()
    assert "interdomain = interdomain.tools.main:main" in (info / "entry_points.txt").read_text()
    metadata = (info / "METADATA").read_text()
    needed = {
        Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)", metadata, re.MULTILINE)
    }
    assert needed >= {Requirement(line) for line in PYPROJECT["project"]["dependencies"]}
    targets = re.findall(r"\]\(([^)]*)\)|(?:src|srcset|href)=\"([^\"]*)\"", metadata)
    assert "# Interdomain Attention" in metadata
    assert all(target.startswith("https://") for pair in targets for target in pair if target)


def test_commands_find_the_wheel_s_train_configs(wheel, tmp_path):
    """From an empty folder."""
    lines = {
        "main launch --dry-run": "data/stdlib, which the run prepares first",
        "study plan train_configs/studies/small.toml": " missing: ",
    }
    for (status, out, err), words in zip(
        tools([*lines], tmp_path, wheel), lines.values(), strict=True
    ):
        assert status == 0, err
        assert words in out
    assert not [*tmp_path.iterdir()]


LACKING = {
    "main launch": ("tyro", "train"),
    "main study plan train_configs/studies/small.toml": ("torchtitan", "train"),
    "study show one": ("tyro", "train"),
    "compare_runs one two": ("tensorboard", "train"),
    "evaluate folder --tasks mmlu": ("lm_eval", "eval"),
    "prepare_data --input x.parquet --output out --tokenizer tokenizer.json": (
        "tokenizers",
        "data",
    ),
}


def test_a_command_names_the_extra_that_it_lacks(wheel, tmp_path):
    """In one line, where only the wheel's own dependencies are installed."""
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in ("x.parquet", "one/events.out.tfevents.1", "two/events.out.tfevents.1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    ends = tools([*LACKING], tmp_path, wheel, without=set().union(*_cli.EXTRAS.values()))
    for (status, out, err), (module, extra) in zip(ends, LACKING.values(), strict=True):
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert module in err
        assert f"-m pip install 'interdomain[{extra}]'" in err


def python(code, cwd, **env):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def tools(lines, cwd, wheel, without=()):
    """(status, output, errors) of `python -m interdomain.tools.LINE` for each line, from the wheel, as if the packages
    `without` were not installed. Each is a fork of one process that has imported what they need."""
    log = tempfile.mkdtemp(dir=wheel.parent)
    code = f"""
import os, runpy, sys, {"torch" if without else "interdomain.titan.settings.job_config"}
sys.modules.update(dict.fromkeys({sorted(without)!r}))  # imports fail, find_spec finds nothing
for i, line in enumerate({lines!r}):
    if not os.fork():
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{log}/{{i}}.{{name}}", os.O_CREAT | os.O_WRONLY), stream)
        module, *sys.argv[1:] = line.split()
        runpy.run_module("interdomain.tools." + module, run_name="__main__", alter_sys=True)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = python(code, cwd, PYTHONPATH=str(wheel))
    assert done.returncode == 0, done.stderr
    said = [
        [Path(log, f"{i}.{name}").read_text() for name in ("out", "err")] for i in range(len(lines))
    ]
    return [(int(status), *texts) for status, texts in zip(done.stdout.split(), said, strict=True)]


# A child in which a socket or a warning of ours is an error. Others' imports come first: their warnings are theirs.
STRICT = """
import sys, warnings, socket
class NoNetwork(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket was opened")
socket.socket = NoNetwork
socket.create_connection = socket.getaddrinfo = None
import numpy, safetensors.torch, sentencepiece, torch, torch.distributed.checkpoint, torch.distributed.tensor, tqdm
for name in {theirs!r}:
    __import__(name)
warnings.simplefilter("error")
import importlib
for name in {ours!r}:
    importlib.import_module(name)
"""


def test_imports_are_silent_and_open_no_socket(tmp_path):
    """The plugin is imported before the trainer in a run; here after it, so that what warns is ours.

    Megatron always warns, in our modules too.
    """
    needs = {"interdomain.hf": "transformers", "interdomain.titan": "torchtitan"}
    of_torchtitan_0_3 = tuple(
        f"interdomain.titan.{name}" for name in ("spec_0_3", "entry_0_3", "host.titan_0_3")
    )
    missing = (
        *("interdomain.megatron", "interdomain.vllm", *of_torchtitan_0_3),
        *(ours for ours, theirs in needs.items() if not importlib.util.find_spec(theirs)),
    )
    theirs = [
        {"torchtitan": "torchtitan.train"}.get(name, name)
        for ours, name in needs.items()
        if ours not in missing
    ]
    ours = [name for name in MODULES if not name.startswith(missing)]
    done = python(STRICT.format(theirs=theirs, ours=ours), tmp_path)
    assert done.returncode == 0, done.stderr


# What stands in the files


def test_no_file_is_too_long():
    lines = {
        path: len(path.read_text().splitlines()) for path in files(".py", ".sh", ".toml", ".md")
    }
    assert not {str(path): n for path, n in lines.items() if n > MAX_LINES}


MACHINE_PATH = re.compile(
    r"(?<![\w.~<>})/])/(?:home|root|work|Users|mnt|scratch|lustre|tmp|opt|var|srv)/\w"
)


def test_no_file_names_a_machine_s_paths():
    for path in files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for i, line in enumerate(text.splitlines(), 1):
            assert not MACHINE_PATH.search(line), f"{path}:{i}: {line.strip()}"


# The tools

TOOLS = [name for name in MODULES if name.startswith("interdomain.tools.") and "._" not in name]
COMMANDS = {f"interdomain.tools.{file.stem}": name for name, file in main.TOOLS.items()}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_s_first_line_can_be_pasted(tool):
    """Its docstring opens with it. argparse, which ends the process at an unknown option, accepts it and the other examples."""
    first, blank, *rest = ast.get_docstring(
        ast.parse(MODULES[tool].read_text()), clean=False
    ).split("\n")
    assert first.startswith(f"interdomain {COMMANDS.get(tool, '')}")
    assert blank == ""
    for example in (
        first,
        *(line for line in rest if line.startswith("    ") and "interdomain " in line),
    ):
        name, *line = shlex.split(example.partition("interdomain ")[2])
        importlib.import_module(f"interdomain.tools.{main.TOOLS[name].stem}").parse(line)


def test_every_tool_is_a_command_with_help(capsys, monkeypatch):
    assert {*COMMANDS, "interdomain.tools.main"} == {*TOOLS}
    assert PYPROJECT["project"]["scripts"] == {"interdomain": "interdomain.tools.main:main"}
    monkeypatch.setattr(sys, "argv", ["interdomain"])
    for tool, name in COMMANDS.items():
        for call, argv in ((importlib.import_module(tool).main, []), (main.main, [name])):
            with pytest.raises(SystemExit) as ended:
                call([*argv, "--help"])
            assert not ended.value.code
            shown = capsys.readouterr().out
            assert shown.startswith(
                f"usage: {'./launch.sh' if name == 'launch' else f'interdomain {name}'} "
            ), name
            (page,) = re.findall(r"^Documentation: (docs/[\w-]+\.md)", shown, re.MULTILINE)
            assert (REPOSITORY / page).is_file(), name


def test_the_list_of_commands_imports_nothing_heavy(tmp_path):
    code = "import sys; from interdomain.tools import main; main.main([]); print(*sys.modules)"
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    *listed, modules = done.stdout.splitlines()
    for name, file in main.TOOLS.items():
        assert any(line.split() == [name, *main.summary(file).split()] for line in listed)
    assert not {"torch", "numpy", "torchtitan"} & {*modules.split()}


def test_an_unknown_command(capsys):
    assert main.main(["prepar"]) == 2
    assert "there is no command 'prepar'" in capsys.readouterr().err


def test_removed_names_are_answered_and_stand_nowhere_else(capsys):
    """A user is told what to do instead, by the sentence that the changelog has."""
    changelog = " ".join((REPOSITORY / "CHANGELOG.md").read_text().split())
    here = {"CHANGELOG.md", "plugin/interdomain/removed.py"}
    for name, instead in REMOVED.items():
        assert f"`{name}`" in changelog, name
        assert instead in changelog, name
        if name.startswith("interdomain."):
            with pytest.raises(SystemExit, match=re.escape(instead)):
                runpy.run_module(name, run_name="__main__")
        elif "." in name:
            flag = name.replace(" = ", "=") if " = " in name else f"{name}=1"
            assert main.main(["launch", f"--{flag}"]) == 2
            assert instead in capsys.readouterr().err
        else:
            assert main.main(["launch", name] if name.startswith("--") else name.split()) == 2
            assert instead in capsys.readouterr().err
        used = re.escape(name).replace(r"\ ", r"[^\n]* ")
        if name.startswith("--"):
            used = rf"launch\.sh[^\n]* {used}\b"
        elif "." not in name:
            used = rf"interdomain {used}\b"
        for path in {
            str(path.relative_to(REPOSITORY)) for path in files(".py", ".sh", ".toml", ".md")
        } - here:
            assert not re.search(used, (REPOSITORY / path).read_text()), f"{path} names {name}"


def test_hashed_constraints_are_the_constraints():
    """Every version in constraints-hashed.txt that constraints.txt pins is the same there."""

    def versions(file):
        lines = re.findall(
            r"^([\w.-]+)==([^\s;\\]+)", (REPOSITORY / file).read_text(), re.MULTILINE
        )
        return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}

    pinned, hashed = versions("constraints.txt"), versions("constraints-hashed.txt")
    assert len(pinned.keys() & hashed.keys()) > 50
    assert all(hashed[name] == pinned[name] for name in pinned.keys() & hashed.keys())
