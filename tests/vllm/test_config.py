"""Facts that vLLM asks of a folder before it loads it. They need no vLLM."""

import subprocess
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
    """The shapes are those of a model's own state; the configuration comes back from config.json."""
    condition, options = CASES[case]
    config = small_config(condition, **options)
    served = ServedConfig(**to_transformers(config))
    assert model_config(served) == config
    assert served.architectures == [f"Interdomain{KINDS.get(case, '')}ForCausalLM"]
    for layer, state in zip(config.layers, Transformer(config).init_state(3).layers, strict=True):
        if layer.mixer.kind != "softmax":
            assert [t.dtype for t in (state.conv, state.ssm)] == [*state_dtypes(torch.float32)]
            assert mixer_class(layer.mixer).state_shapes(layer) == {
                name: tuple(t.shape[1:]) for name, t in state.tensors().items()
            }
            assert all(0 not in shape for shape in state_shapes(layer, 1))


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "interdomain.vllm needs vLLM, the extra `vllm`: pip install 'interdomain[vllm]'."),
        ("0.31.1", "interdomain.vllm runs with vLLM 0.32, and this is 0.31.1. Install vLLM 0.32."),
    ],
)
def test_without_vllm_or_with_another(version, words, tmp_path):
    path = [str(tmp_path)]
    (tmp_path / "vllm.py").write_text(
        f"__version__ = {version!r}" if version else "raise ImportError"
    )
    program = f"import sys; sys.path[:0] = {path}; from interdomain.vllm import Interdomain"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            dict(quantization="fp8", quant_config="fp8"),
            "this model has no quantization = fp8 under vLLM",
        ),
        (
            dict(mamba_ssm_cache_dtype="bfloat16"),
            "this model has no mamba_ssm_cache_dtype = bfloat16 under vLLM",
        ),
        (
            dict(mamba_cache_dtype="bfloat16"),
            "this model has no mamba_cache_dtype = bfloat16 under vLLM",
        ),
        (dict(cache_dtype="fp8"), "this model has no kv_cache_dtype = fp8 under vLLM"),
        (dict(speculative_config="ngram"), "this model has no speculative decoding under vLLM"),
        (dict(tensor_parallel_size=3), r"tensor_parallel_size = 3 must divide the heads, \[4\]"),
    ],
)
def test_settings_that_would_be_ignored(settings, words):
    usual = dict(
        quantization=None, quant_config=None, speculative_config=None, tensor_parallel_size=1
    )
    usual |= dict.fromkeys(("cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype"), "auto")
    every = SimpleNamespace(**(usual | settings))
    every.cache_config = every.parallel_config = every.model_config = every
    with pytest.raises(ValueError, match=words):
        check_vllm_settings(every, small_config("interdomain"))
    if "cache_dtype" in settings:  # of keys and values, which some layers of this one have
        check_vllm_settings(every, small_config("interdomain", softmax_every=2))
