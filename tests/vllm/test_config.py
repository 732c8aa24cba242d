"""Facts that vLLM asks of an exported model before it loads it. They need no vLLM."""

import sys
from types import SimpleNamespace

import pytest
import torch

from interdomain.checkpoint.pretrained import to_transformers
from interdomain.model import Transformer
from interdomain.model.transformer import mixer_class
from interdomain.vllm.config import (
    ServedConfig,
    check_vllm_settings,
    model_config,
    state_dtypes,
    state_shapes,
)

from ..hf.common import CASES
from ..model.common import small_config

KINDS = {"softmax": "Softmax", "window": "Softmax", "hybrid": "Hybrid", "hybrid, window": "Hybrid"}


@pytest.mark.parametrize("case", CASES)
def test_the_shapes_of_states_and_the_architecture(case):
    """The shapes are those of a model's own state. config.json gives the configuration back."""
    condition, options = CASES[case]
    config = small_config(condition, **options)
    served = ServedConfig(**to_transformers(config))
    assert model_config(served) == config
    assert served.architectures == [f"Interdomain{KINDS.get(case, '')}ForCausalLM"]
    state = Transformer(config).init_state(3)
    for layer, layer_state in zip(config.layers, state.layers, strict=True):
        if layer.mixer.kind == "softmax":
            continue
        assert list(state_dtypes(torch.float32)) == [layer_state.conv.dtype, layer_state.ssm.dtype]
        shapes = {name: tuple(x.shape[1:]) for name, x in layer_state.tensors().items()}
        assert mixer_class(layer.mixer).state_shapes(layer) == shapes
        assert all(0 not in shape for shape in state_shapes(layer, 1))


@pytest.mark.parametrize(
    ("vllm", "words"),
    [
        (None, "interdomain.vllm needs vLLM, the extra `vllm`: pip install"),
        (SimpleNamespace(__version__="0.31.1"), "runs with vLLM 0.32, and this is 0.31.1"),
    ],
)
def test_without_vllm_or_with_another(monkeypatch, vllm, words):
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(ImportError, match=words):
        from interdomain.vllm import Interdomain  # noqa: F401


def check_settings(config, **changes):
    """Checks vLLM's settings, which are its defaults but for the changes."""
    settings = SimpleNamespace(
        quantization=None,
        quant_config=None,
        speculative_config=None,
        tensor_parallel_size=1,
        cache_dtype="auto",
        mamba_cache_dtype="auto",
        mamba_ssm_cache_dtype="auto",
    )
    vars(settings).update(changes)
    # One object takes the place of vLLM's four.
    settings.cache_config = settings
    settings.parallel_config = settings
    settings.model_config = settings
    check_vllm_settings(settings, config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"quantization": "fp8", "quant_config": "fp8"},
            "this model has no quantization = fp8 under vLLM",
        ),
        (
            {"mamba_ssm_cache_dtype": "bfloat16"},
            "this model has no mamba_ssm_cache_dtype = bfloat16 under vLLM",
        ),
        ({"cache_dtype": "fp8"}, "this model has no kv_cache_dtype = fp8 under vLLM"),
        ({"speculative_config": "ngram"}, "this model has no speculative decoding under vLLM"),
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size = 3 must divide the heads, \[4\]"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        check_settings(small_config("interdomain"), **settings)


def test_layers_of_softmax_have_a_cache_in_fp8():
    check_settings(small_config("interdomain", softmax_every=2), cache_dtype="fp8")
