import functools
import importlib
import os

import pytest

from .common import CASES, EXPECTED

os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure(config):
    names = (
        "accelerate_tests",
        "flash_attn_test",
        "flash_attn_3_test",
        "flash_attn_4_test",
        "generate",
        "slow",
        "torch_compile_test",
    )
    for name in names:
        config.addinivalue_line("markers", f"{name}: of transformers' own tests")


@pytest.fixture(scope="session", autouse=True)
def expected_version(modules_cache):
    assert importlib.import_module("transformers").__version__.startswith(
        os.environ.get(EXPECTED, "")
    )


@pytest.fixture(autouse=True)
def not_registered(monkeypatch):
    """Undoes the registration by an import of `interdomain.hf`.

    transformers 5 takes registered code even if the exported model's code is trusted.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        others = {
            key: value
            for key, value in mapping._extra_content.items()
            if "interdomain" not in (key, getattr(key, "model_type", ""))
        }
        monkeypatch.setattr(mapping, "_extra_content", others)


@pytest.fixture
def package():
    """`interdomain.hf`, whose import registers it for this test."""
    return importlib.reload(importlib.import_module("interdomain.hf"))


@pytest.fixture(scope="session")
def exported(exported_model):
    """exported(case) -> (the model, the folder that convert wrote). See CASES."""

    def export(case):
        condition, settings = CASES[case]
        return exported_model(condition, **settings)

    return export


@pytest.fixture(scope="session")
def loaded(exported):
    """loaded(case) -> (the model, the same in transformers, by the exported model's own code)."""
    from transformers import AutoModelForCausalLM

    @functools.cache
    def load(case):
        model, folder = exported(case)
        return model, AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

    return load


@pytest.fixture
def native(loaded, case):
    return loaded(case)[0]


@pytest.fixture
def there(loaded, case):
    """The model of a test's `case` in transformers. No test changes it."""
    return loaded(case)[1]
