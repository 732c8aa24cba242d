"""Interdomain Attention as a TorchTitan model: `torchrun -m torchtitan.train --job.config_file train_configs/125M.toml`.

TorchTitan imports this package (`experimental.custom_import`) before it looks at a device, and `job_config` for the TOML
sections. It is the only place that imports TorchTitan; `plan.py` refuses what cannot run before anything is built, and
`trainer.py` holds what TorchTitan has no hook for.
"""

from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from interdomain.model import SIZES, build_config

from . import device, trainer
from .data import build_dataloader, build_tokenizer
from .metrics import build_metrics_processor
from .model import InterdomainModel, InterdomainModelArgs
from .optimizer import build_lr_schedulers, build_optimizers
from .parallelize import parallelize
from .settings import NAME
from .validate import build_validator

device.use_cpu_if_alone()
trainer.install(NAME)
register_train_spec(
    NAME,
    TrainSpec(
        model_cls=InterdomainModel,
        model_args={size: InterdomainModelArgs(config=build_config(size)) for size in SIZES},
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=build_tokenizer,
        build_loss_fn=trainer.build_loss,
        build_validator_fn=build_validator,
        build_metrics_processor_fn=build_metrics_processor,
    ),
)
