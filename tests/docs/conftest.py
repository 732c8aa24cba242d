"""A clone of the repository, and training there on ranks that are forks."""

import re
import shutil
import sys

import pytest

from interdomain.tools import launch
from interdomain.tools._start import torchrun

from ..common import REPOSITORY, write_program
from ..ranks import launch as launch_ranks

WRITTEN = ("data", "outputs", "exports")
COPIED = ("benchmarks", "docs", "train_configs")  # a command might write there
# Changes to a file of settings: a hundred steps are one, on a few sequences.
SMALL = {
    r"(?<=\[training\]\n)tokens = .*": "steps = 4",
    r"(?<=\[validation\]\n)(enable = true\n)tokens = .*": r"\1tokens = 512",
    r"warmup_\w+ = .*": "warmup_steps = 1",
    r"(freq|interval) = .*": r"\1 = 4",
    r"(\[validation\](?:\n.+)*?\nlocal_batch_size) = .*": r"\1 = 1",
    r"(\[training\](?:\n.+)*?\nlocal_batch_size) = .*": r"\1 = 1",
    r"global_batch_size = .*": "global_batch_size = 2",
}


class Workspace:
    """A folder with the repository's files. `launch` trains there, on ranks that are forks (tests/titan/conftest.py)."""

    def __init__(self, path):
        self.path = path
        self.stop_at = 0

    def run(self, command, environment):
        """Takes the place of torchrun."""
        number = command[command.index("--nproc-per-node") + 1]
        arguments = command[command.index("interdomain.titan.entry") + 1 :]
        program = [REPOSITORY / "tests/docs/rank.py", self.stop_at, *arguments]
        log = self.path / "small/log.txt"
        log.unlink(missing_ok=True)  # the one of an earlier run
        output = launch_ranks(log, int(number), *program)
        print(output)
        return torchrun.CONTINUE if "The same command continues" in output else 0

    def train(self, argv, stop=False):
        """Returns launch.sh's status. With `stop` the run is asked to leave before its second step."""
        config = launch.parse(argv)[0].config
        flags = [word for word in argv if not word.endswith(".toml")]
        text = (self.path / config).read_text()
        for pattern, value in SMALL.items():
            text = re.sub(pattern, value, text)
        small = self.path / "small" / config
        small.parent.mkdir(parents=True, exist_ok=True)
        small.write_text(text)
        self.stop_at = 2 if stop else 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torchrun, "run", self.run)
            return launch.main([f"small/{config}", *flags])


@pytest.fixture(scope="session")
def environment(tmp_path_factory, modules_cache):
    """There is no network. The caches of transformers and datasets are not the user's."""
    values = {
        "HF_HOME": str(tmp_path_factory.mktemp("huggingface")),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "MPLBACKEND": "Agg",
        "CUDA_VISIBLE_DEVICES": "",
        "INTERDOMAIN_PYTHON": sys.executable,
        "INTERDOMAIN_SITE": "local",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def clone(tmp_path_factory):
    """The repository's files as a clone has them, with Python where the pages expect it."""
    path = tmp_path_factory.mktemp("docs") / "first"
    (path / ".venv/bin").mkdir(parents=True)
    write_program(path / ".venv/bin/python", f'exec {sys.executable} "$@"')
    for file in REPOSITORY.iterdir():
        if file.name in COPIED:
            shutil.copytree(file, path / file.name)
        elif file.name not in (*WRITTEN, ".venv", ".git", "build"):
            (path / file.name).symlink_to(file)
    return path
