"""The model in transformers. Importing this package registers it: the Auto classes then need no trust_remote_code.

The four files `*_interdomain.py` are copied into every standalone folder. They import torch and transformers, and the
kernels of `interdomain.scan` and `interdomain.features` if these are installed, nothing else of this project.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

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
AutoConfig.register(InterdomainConfig.model_type, InterdomainConfig, exist_ok=True)
InterdomainConfig.register_for_auto_class()  # save_pretrained then copies the code
for auto_class, model_class in CLASSES.items():
    auto_class.register(InterdomainConfig, model_class, exist_ok=True)
    model_class.register_for_auto_class(auto_class.__name__)
