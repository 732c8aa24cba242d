"""The model as TorchTitan builds it: arguments from the job configuration, initial values under any sharding."""

from dataclasses import dataclass, field, replace

import torch
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from interdomain.model import Execution, ModelConfig, Transformer, build_config, count_parameters
from interdomain.model.flops import train_flops_per_token

from .parallelize import set_initial_values
from .plan import DEFAULT_SEED, make_plan
from .resume_from import loads_a_model


@dataclass
class InterdomainModelArgs(BaseModelArgs):
    """One per size; TorchTitan logs it as JSON."""

    config: ModelConfig = field(default_factory=lambda: build_config("debug"))
    execution: Execution = field(default_factory=Execution)
    seed: int = DEFAULT_SEED
    loaded: bool = False  # whether this start loads a checkpoint

    def update_from_config(self, job_config, **kwargs) -> None:
        """Take the cell of the study from [mixer], and write what the plan resolves back into TorchTitan's own fields."""
        plan = make_plan(job_config, torch.distributed.get_world_size())
        self.config, self.execution, self.seed = plan.config, plan.execution, plan.seed
        self.loaded = torch.distributed.is_initialized() and loads_a_model(job_config)
        job_config.training.steps, job_config.training.tokens = plan.steps, 0
        job_config.lr_scheduler.warmup_steps, job_config.lr_scheduler.warmup_tokens = plan.warmup_steps, 0
        if job_config.mixer.recompute == "auto":
            recompute = _on_any_rank(plan.execution.recompute)
            self.execution = replace(plan.execution, recompute=recompute)
            job_config.mixer.recompute = recompute  # what is recorded
            if "scores" in plan.computed:
                other = recompute != plan.execution.recompute
                words = (
                    "auto: computed again, for another rank's GPU has less memory" if other else plan.computed["scores"]
                )
                logger.info("scores of the scan: %s", words)

    def get_nparams_and_flops(self, model, seq_len: int) -> tuple[int, int]:
        return count_parameters(model), train_flops_per_token(self.config, seq_len)


def _on_any_rank(here: bool) -> bool:
    """Collective, where there are ranks."""
    if not torch.distributed.is_initialized():
        return here
    there = torch.tensor(int(here), device=utils.device_type)
    torch.distributed.all_reduce(there, op=torch.distributed.ReduceOp.MAX)
    return bool(there.item())


class InterdomainModel(Transformer):
    def __init__(self, args: InterdomainModelArgs) -> None:
        super().__init__(args.config, args.execution)
        self.model_args = args

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        device = buffer_device or self.layers["0"].attention_norm.weight.device
        set_initial_values(self, self.model_args.seed, loaded=self.model_args.loaded, device=device)
