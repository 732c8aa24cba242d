"""A configuration of TorchTitan 0.3.0 with this model, as a user writes it: --module tests.titan.own_config --config tiny.

The environment variable OWN_DATA names a folder with `data` (texts in JSON lines) and `assets` (a tokenizer).
"""

import os

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.trainer import Trainer

from interdomain.titan import model_spec


def tiny():
    folder = os.environ["OWN_DATA"]
    text = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=f"{folder}/data")
    return Trainer.Config(
        model_spec=model_spec("debug", vocab_size=512, n_layers=2, softmax_every=2),
        hf_assets_path=f"{folder}/assets",
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=8,
            global_batch_size=8,
            seq_len=64,
            steps=3,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=text,
        validator=Validator.Config(enable=True, freq=2, steps=2, dataloader=text),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=3, last_save_model_only=False),
        debug=DebugConfig(enable_structured_logging=False),
    )
