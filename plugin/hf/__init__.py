"""The model in transformers: importing this registers it, so that AutoModelForCausalLM needs no trust_remote_code.

An exported folder carries the same code (`interdomain.bundle` writes it) for where this package is not installed.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from interdomain.bundle import write_code

from .configuration import InterdomainConfig
from .modeling import InterdomainCache, InterdomainForCausalLM

__all__ = ["InterdomainCache", "InterdomainConfig", "InterdomainForCausalLM", "write_code"]

AutoConfig.register(InterdomainConfig.model_type, InterdomainConfig, exist_ok=True)
AutoModelForCausalLM.register(InterdomainConfig, InterdomainForCausalLM, exist_ok=True)
InterdomainForCausalLM.write_code = staticmethod(write_code)
