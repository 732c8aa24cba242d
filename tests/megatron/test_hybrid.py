"""HybridModel with the layers, on two ranks. Where the installed Megatron-Core has none, that of the version beside it."""

import importlib.util
import os

import pytest
import torch

from interdomain.megatron.checkpoint import MegatronCheckpoint, hybrid_pattern, write_checkpoint
from interdomain.model import Transformer, build_config
from interdomain.model.flops import train_flops_per_token
from interdomain.tools import convert

from ..model.common import lively
from ..ranks import launch
from . import hybrid, ranks

MEGATRON019 = "INTERDOMAIN_MEGATRON019"  # a folder with Megatron-Core 0.19; `./launch.sh test` makes and names it
INSTALLED = importlib.util.find_spec("megatron.core.models").submodule_search_locations[0]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """(a model, the folder of its checkpoint for HybridModel)."""
    folder, model = tmp_path_factory.mktemp("hybrid"), lively(hybrid.config_of(), torch.float32)
    write_checkpoint(folder, model.config, model.state_dict(), hybrid=True)
    return model, folder


@pytest.fixture(scope="module")
def computed(start):
    """Parts of the gradients, from each rank."""
    newer = [os.environ[MEGATRON019]] if MEGATRON019 in os.environ else []
    if not newer and not os.path.isdir(f"{INSTALLED}/hybrid"):
        pytest.skip(
            f"megatron-core has no HybridModel, and {MEGATRON019} names no folder with 0.19"
        )
    _, folder = start
    launch(folder / "log", 2, hybrid.__file__, folder, *newer)
    return [torch.load(folder / f"gradients {rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("layout", hybrid.LAYOUTS)
def test_every_gradient(layout, start, computed):
    """float32, against the plain model in float64."""
    model = Transformer(start[0].config)
    model.load_state_dict(start[0].state_dict())
    tokens = ranks.tokens_of(0)
    (model.double()(tokens[:, :-1], labels=tokens[:, 1:]) / (ranks.BATCH * ranks.T)).backward()
    found = ranks.whole_gradients(
        model.config, [part for seen in computed for part in seen[layout]], "hybrid"
    )
    for name, p in model.named_parameters():
        assert (found[name] - p.grad).norm() < 1e-4 * p.grad.norm(), name


def test_the_log_counts_the_flops_of_this_model(computed):
    model = build_config("125M", layers=hybrid.LAYERS, n_layers=4, vocab_size=1000)
    assert computed[0]["FLOPs"] == 2 * 4096 * train_flops_per_token(model, 4096)


@pytest.mark.parametrize("pattern", hybrid.PATTERNS)
def test_patterns_without_a_folder_are_refused(pattern, computed):
    assert computed[0][pattern].startswith(
        f"the layer pattern {pattern!r} is of no model that this project converts."
    )


def test_a_checkpoint_becomes_a_folder_and_comes_back(start, corpus, tmp_path, capsys):
    model, folder = start
    run = [folder / "release", "--tokenizer", corpus, "--output", tmp_path / "folder"]
    again = [tmp_path / "folder", "--to-megatron", "hybrid", "--output", tmp_path / "start"]
    assert convert.main([str(x) for x in run]) == convert.main([str(x) for x in again]) == 0
    assert '--hybrid-layer-pattern "G-*-G-M-"' in capsys.readouterr().out
    checkpoint, wanted = MegatronCheckpoint(tmp_path / "start" / "release"), model.state_dict()
    assert checkpoint.config.mixers == model.config.mixers
    for name, tensor in checkpoint.read([*wanted]).items():
        assert torch.equal(tensor, wanted[name])


def test_two_mixers_of_one_letter_have_no_pattern():
    with pytest.raises(ValueError, match="mixers that differ and would all be G"):
        hybrid_pattern(build_config("debug", layers=("interdomain", "s4d")))
