"""transformers' own tests of a model, with its own random masks, run on the folder's classes.

`./launch.sh test` takes them from transformers' source distribution. Its tests of generation, and two more mixers, are in the
repository alone; fetch it at the installed version to run them:

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers ~/transformers
    INTERDOMAIN_TRANSFORMERS_SUITE=~/transformers/tests pytest tests/hf/test_transformers_suite.py

None of them is left out here; some leave themselves out, by what a model declares or a machine has.
"""

import importlib
import os
import sys
import types
import unittest
from pathlib import Path

import pytest

SUITE = "INTERDOMAIN_TRANSFORMERS_SUITE"
if not os.environ.get(SUITE):
    pytest.skip(f"{SUITE} names no folder with transformers' tests", allow_module_level=True)
pytest.importorskip("parameterized")
if not hasattr(importlib.import_module("transformers"), "PreTrainedConfig"):
    pytest.skip("they are of transformers 5", allow_module_level=True)
hf = importlib.import_module("interdomain.hf")

FOLDER = Path(os.environ[SUITE])
# A package of another name than ours: transformers' tests import each other relatively.
PACKAGE = "transformers_suite"
WHOLE = (FOLDER / "generation").is_dir()
sys.modules[PACKAGE] = types.ModuleType(PACKAGE)
sys.modules[PACKAGE].__path__ = [str(FOLDER)]
MIXINS_OF_THE_REPOSITORY = {
    "exporters.test_export": "ExportTesterMixin",
    "generation.test_utils": "GenerationTesterMixin",
}
if not WHOLE:
    for name, mixin in MIXINS_OF_THE_REPOSITORY.items():
        package, _, _ = name.partition(".")
        module = types.ModuleType(name)
        setattr(module, mixin, type(mixin, (), {}))
        sys.modules[f"{PACKAGE}.{package}"] = types.ModuleType(package)
        sys.modules[f"{PACKAGE}.{name}"] = module


def suite(name: str):
    return importlib.import_module(f"{PACKAGE}.{name}")


common = suite("test_modeling_common")
generation = suite("generation.test_utils")
# transformers' tests choose labels by these, and parameters that have no gradient.
common.MODEL_MAPPING_NAMES["interdomain"] = "InterdomainModel"
common.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["interdomain"] = "InterdomainForCausalLM"
classifiers = common.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
classifiers["interdomain"] = "InterdomainForSequenceClassification"


class Settings:
    """A small model and a batch of two texts for it."""

    is_training = True
    batch_size = 2
    seq_length = 7
    hidden_size = 32
    num_hidden_layers = 2

    def __init__(self, parent, **settings) -> None:
        self.parent = parent
        self.settings = settings

    def get_config(self):
        return hf.InterdomainConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            vocab_size=99,
            num_attention_heads=4,
            n_basis=6,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            max_position_embeddings=64,
            **self.settings,
        )

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        tokens = common.ids_tensor([self.batch_size, self.seq_length], config.vocab_size - 3) + 3
        mask = common.random_attention_mask([self.batch_size, self.seq_length])
        return config, {"input_ids": tokens, "attention_mask": mask}


class Suite(common.ModelTesterMixin, generation.GenerationTesterMixin):
    all_model_classes = (
        hf.InterdomainModel,
        hf.InterdomainForCausalLM,
        hf.InterdomainForSequenceClassification,
    )
    all_generative_model_classes = (hf.InterdomainForCausalLM,)
    has_attentions = False
    test_resize_embeddings = True
    settings: dict = {}  # noqa: RUF012

    def setUp(self) -> None:
        importlib.reload(hf)  # registers the classes, which another fixture has undone
        self.model_tester = Settings(self, **self.settings)

    @unittest.skipUnless(WHOLE, "a test of generation")
    def test_left_padding_compatibility(self) -> None:
        self.has_attentions = True  # or it takes the model for one that cannot be padded
        super().test_left_padding_compatibility()

    def _check_past_key_values_for_generate(
        self, batch_size, past_key_values, seq_length, config
    ) -> None:
        assert isinstance(past_key_values, hf.InterdomainCache)
        assert past_key_values.get_seq_length() == seq_length
        assert {len(x) for pair in past_key_values.states.values() for x in pair} == {batch_size}

    def _check_caches_are_equal(self, cache1, cache2) -> None:
        for i, pair in cache1.states.items():
            for x, y in zip(pair, cache2.states[i], strict=True):
                common.torch.testing.assert_close(x, y)


class TestInterdomain(Suite, unittest.TestCase):
    pass


if WHOLE:

    class TestS4D(Suite, unittest.TestCase):
        settings = dict(dual_input=False, query_readout=False, rope=False)  # noqa: RUF012

    class TestSoftmax(Suite, unittest.TestCase):
        settings = dict(mixer="softmax")  # noqa: RUF012
