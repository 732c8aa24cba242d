"""The model in transformers. Importing this package registers it: the Auto classes then need no trust_remote_code.

The files `*_interdomain.py` are copied into every exported model (`checkpoint.model_code`), and plain_interdomain.py
with the text of the definitions that it imports here. In an exported model they import torch and transformers, and
the kernels of `interdomain.scan` and `interdomain.features` if these are installed: nothing else of this project.
"""

from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from interdomain.checkpoint.model_code import write_code

from .configuration_interdomain import InterdomainConfig
from .modeling_interdomain import (
    InterdomainCache,  # noqa: F401
    InterdomainForCausalLM,
    InterdomainForSequenceClassification,
    InterdomainModel,
)

CLASSES = {
    AutoModel: InterdomainModel,
    AutoModelForCausalLM: InterdomainForCausalLM,
    AutoModelForSequenceClassification: InterdomainForSequenceClassification,
}


def save_pretrained(self: PretrainedConfig, save_directory: str | Path, **options: Any) -> None:
    """Saves a configuration as transformers does, which copies the files of this folder, and then the code that
    needs nothing of this project.

    Args:
        options: Those of `PretrainedConfig.save_pretrained`.
    """
    PretrainedConfig.save_pretrained(self, save_directory, **options)
    write_code(Path(save_directory))


# A model's save_pretrained calls the configuration's after its code is copied and before an upload.
InterdomainConfig.save_pretrained = save_pretrained  # pyright: ignore[reportAttributeAccessIssue]
AutoConfig.register(InterdomainConfig.model_type, InterdomainConfig, exist_ok=True)
InterdomainConfig.register_for_auto_class()  # save_pretrained then copies the code
for auto_class, model_class in CLASSES.items():
    auto_class.register(InterdomainConfig, model_class, exist_ok=True)
    model_class.register_for_auto_class(auto_class.__name__)
