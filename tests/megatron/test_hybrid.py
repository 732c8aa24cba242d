"""HybridModel with the layers, on two ranks, by Megatron-Core 0.18 or later."""

import importlib.util
import os

import pytest
import torch

from interdomain.megatron.checkpoint import hybrid_pattern
from interdomain.model import build_config
from interdomain.model.flops import train_flops_per_token

from ..ranks import launch
from . import hybrid, ranks

# A folder with Megatron-Core 0.19. `./launch.sh test` makes and names it.
MEGATRON019 = "INTERDOMAIN_MEGATRON019"
INSTALLED = importlib.util.find_spec("megatron.core.models").submodule_search_locations[0]
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """What each rank has computed."""
    newer = []
    if MEGATRON019 in os.environ:
        newer.append(os.environ[MEGATRON019])
    elif not os.path.isdir(f"{INSTALLED}/hybrid"):
        pytest.skip(f"megatron-core has no HybridModel, and {MEGATRON019} is not set")
    folder = tmp_path_factory.mktemp("hybrid")
    ranks.write_start(folder, "layers", hybrid=True)
    launch(folder / "log", 2, hybrid.__file__, folder, *newer)
    return [torch.load(folder / f"gradients {rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("layout", hybrid.LAYOUTS)
def test_every_gradient(layout, computed):
    """float32 gradients are near the plain model's in float64."""
    model = ranks.plain_model("layers").double()
    tokens = ranks.tokens_of(0)
    loss = model(tokens[:, :-1], labels=tokens[:, 1:])
    (loss / (ranks.BATCH * ranks.T)).backward()
    parts = computed[0][layout] + computed[1][layout]
    found = ranks.whole_tensors(model.config, parts, "hybrid")
    for name, p in model.named_parameters():
        assert (found[name] - p.grad).norm() < 1e-4 * p.grad.norm(), name


def test_the_log_counts_the_flops_of_this_model(computed):
    model = build_config(
        "125M", layers=ranks.CASES["layers"]["layers"], n_layers=4, vocab_size=1000
    )
    assert computed[0]["FLOPs"] == 2 * 4096 * train_flops_per_token(model, 4096)


@pytest.mark.parametrize("pattern", hybrid.PATTERNS)
def test_patterns_that_cannot_be_converted_are_refused(pattern, computed):
    words = f"the layer pattern {pattern!r} is of no model that this project converts."
    assert computed[0][pattern].startswith(words)


def test_two_mixers_of_one_letter_have_no_pattern():
    with pytest.raises(ValueError, match="mixers that differ and would all be G"):
        hybrid_pattern(build_config("debug", layers=("interdomain", "s4d")))
