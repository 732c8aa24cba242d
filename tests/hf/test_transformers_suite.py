"""transformers' own tests of a model, with its own random masks, run on the folder's classes.

`./launch.sh test` takes them from transformers' source distribution, which has no tests of generation and of exporters.
None of the others is left out here; some leave themselves out, by what a model declares or a machine has.
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
sys.modules[PACKAGE] = types.ModuleType(PACKAGE)
sys.modules[PACKAGE].__path__ = [str(FOLDER)]
# The source distribution lacks these modules, which test_modeling_common imports.
MISSING = {
    "exporters.test_export": "ExportTesterMixin",
    "generation.test_utils": "GenerationTesterMixin",
}
for name, mixin in MISSING.items():
    package, _, _ = name.partition(".")
    module = types.ModuleType(name)
    setattr(module, mixin, type(mixin, (), {}))
    sys.modules[f"{PACKAGE}.{package}"] = types.ModuleType(package)
    sys.modules[f"{PACKAGE}.{name}"] = module


common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
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

    def __init__(self, parent) -> None:
        self.parent = parent

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
        )

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        tokens = common.ids_tensor([self.batch_size, self.seq_length], config.vocab_size - 3) + 3
        mask = common.random_attention_mask([self.batch_size, self.seq_length])
        return config, {"input_ids": tokens, "attention_mask": mask}


class TestInterdomain(common.ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (
        hf.InterdomainModel,
        hf.InterdomainForCausalLM,
        hf.InterdomainForSequenceClassification,
    )
    all_generative_model_classes = (hf.InterdomainForCausalLM,)
    has_attentions = False
    test_resize_embeddings = True

    def setUp(self) -> None:
        importlib.reload(hf)  # registers the classes, which another fixture has undone
        self.model_tester = Settings(self)
