"""The model in transformers.

Importing this package registers the model: the Auto classes then need no trust_remote_code.

The files `*_interdomain.py` are copied into every exported model (`checkpoint.model_code`), and
plain_interdomain.py with the text of the definitions that it imports here. In an exported model
they import torch and transformers, and the kernels of `interdomain.scan` and `interdomain.features`
if these are installed: nothing else of this project.
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

# The model's classes, by the Auto class that loads each.
CLASSES = {
    AutoModel: InterdomainModel,
    AutoModelForCausalLM: InterdomainForCausalLM,
    AutoModelForSequenceClassification: InterdomainForSequenceClassification,
}


def save_pretrained(
    self: PretrainedConfig, save_directory: str | Path, push_to_hub: bool = False, **options: Any
) -> None:
    """Saves config.json as transformers does, and then the model's Python files.

    It replaces `InterdomainConfig.save_pretrained`. transformers copies the Python files of this
    folder, too, which need the package. `write_code` then overwrites them with those of an exported
    model, which need only torch and transformers, and adds the licence.

    Args:
        self: The configuration, an InterdomainConfig.
        save_directory: The folder of the exported model.
        push_to_hub: Whether to upload the files, too.
        options: `repo_id`, by default the folder's name, and the other arguments of
            `PretrainedConfig.push_to_hub`.
    """
    PretrainedConfig.save_pretrained(self, save_directory)
    write_code(Path(save_directory))
    # transformers' save_pretrained would upload before the files are overwritten. Its push_to_hub
    # calls this function for a folder of its own, and then uploads that.
    if push_to_hub:
        repo_id = options.pop("repo_id", Path(save_directory).name)
        self.push_to_hub(repo_id, **options)


# A model's save_pretrained calls the configuration's after its code is copied and before an upload.
InterdomainConfig.save_pretrained = save_pretrained  # pyright: ignore[reportAttributeAccessIssue]
AutoConfig.register(InterdomainConfig.model_type, InterdomainConfig, exist_ok=True)
InterdomainConfig.register_for_auto_class()  # save_pretrained then copies the code
for auto_class, model_class in CLASSES.items():
    auto_class.register(InterdomainConfig, model_class, exist_ok=True)
    model_class.register_for_auto_class(auto_class.__name__)
