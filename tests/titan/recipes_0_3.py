"""TorchTitan 0.3.0's own integration tests with this model in the place of llama: docs/torchtitan.md has their results.

--module recipes_0_3 --config NAME: a configuration of `torchtitan_recipes.tests.features`, which lies in TorchTitan's wheel.
"""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan_recipes.tests import features

from interdomain.titan import model_spec


def __getattr__(name):
    recipe = getattr(features, name)

    def with_this_model():
        config = recipe()
        config.model_spec = model_spec("debug", n_layers=6)
        config.loss = CrossEntropyLoss.Config()  # for ChunkedLossWrapper
        config.training.disable_cuda_graphs = True
        config.debug.spmd_typechecking = False  # the model has no types to check
        return config

    return with_this_model
