"""The definitions of the package that the model in transformers uses.

In an exported model this file holds their text (checkpoint/model_code.py).
"""

# ruff: noqa: F401
from interdomain.checkpoint.config_json import from_transformers
from interdomain.model.config import FORMAT_VERSION, ModelConfig
from interdomain.model.feature_maps import float32_modules, widened
from interdomain.model.initialize import initial_value
from interdomain.model.layers import RMSNorm, rope_of
from interdomain.model.mixers.base import Packing, take
from interdomain.model.mixers.kernels import is_exporting
from interdomain.model.mixers.softmax import Attended, SoftmaxMixer, additive_mask
from interdomain.model.settings import MixerConfig
from interdomain.model.state import MixerState, backward_pass, check_not_recomputed
from interdomain.model.transformer import FeedForward, mixer_class
