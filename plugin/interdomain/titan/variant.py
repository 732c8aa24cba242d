"""The model for TorchTitan's own trainer: parts that both of its versions take (`spec`, `spec_0_3`)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Replicate, Shard

from interdomain.checkpoint.pretrained import BASE, stored_name
from interdomain.checkpoint.run_folder import note_folders
from interdomain.checkpoint.step_folder import write_record
from interdomain.model import Transformer
from interdomain.model.initialize import initialize
from interdomain.model.state import ModelState

from .data.dataloader import Batch, read_batch
from .data.folders import open_dataset
from .errors import user_errors
from .host import StateDictAdapter
from .host.patches import add_meshes
from .parallelize import dynamics_of, parallelize, set_initial_values
from .plan.device import device_here
from .plan.run_plan import RunPlan
from .resume.checkpoint import describe_run
from .resume.resume_from import check_half_copies
from .settings.schema import JobConfig
from .step.meshes import Meshes, meshes_of
from .watch.metrics import mixer_statistics, perplexity
from .watch.validate import windows_of


class TitanTransformer(Transformer):
    """The model as TorchTitan's trainer calls it: tokens -> logits of the whole vocabulary."""

    # None until `parallelize_variant`: a model on one device, as scripts and notebooks build it.
    meshes: Meshes | None = None
    # Whether positions say where documents begin. Otherwise they count the tokens, as the model does by itself.
    documents = False
    # Whether the loss takes the logits of the whole vocabulary. Otherwise it takes this tensor-parallel rank's columns.
    whole_logits = True
    freqs_cis = (
        None  # TorchTitan's validator asks for it under context parallelism, and does not use it
    )

    def __init__(self, plan: Any) -> None:
        """plan: a `RunPlan`, or something else with its `config`, `execution` and `seed`."""
        super().__init__(plan.config, plan.execution)
        self.seed = plan.seed

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        positions: Tensor | None = None,
        *,
        last: int | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """tokens [B, T] -> logits [B, T, vocab_size]; of a stage hidden states. Arguments as for the base class."""
        if not self.documents:
            positions = None
        with torch.autocast(
            tokens.device.type, enabled=False
        ):  # `training.precision` says what is rounded
            out = super().forward(tokens, state, positions, last=last, labels=labels)
        if self.heads is None or self.output is None or not self.whole_logits:
            return out
        assert self.meshes is not None
        columns = DTensor.from_local(out, self.meshes.tensor, [Shard(2)], run_check=False)
        return columns.full_tensor(
            grad_placements=[Replicate()]
        )  # every rank computes the whole loss

    def init_weights(self, seed: Any = None, buffer_device: torch.device | None = None) -> None:
        if self.meshes is None:
            initialize(self, self.config, self.seed)
            return
        set_initial_values(
            self,
            self.seed,
            loaded=False,
            device=buffer_device or device_here(),
            group=self.meshes.stage,
        )
        for ssm in dynamics_of(self):
            for p in ssm.parameters():
                p.register_post_accumulate_grad_hook(_sum_shares)

    def verify_module_protocol(self) -> None:
        """Nothing: TorchTitan 0.3 asks for modules of its own where it shards a model. `parallelize` does it here."""

    def get_attention_masks(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            "this model takes no attention masks"
        )  # TorchTitan's validator asks, and expects this error


def _sum_shares(p: Any) -> None:
    """Sum a gradient of which every rank has a share, after each backward pass."""
    p.grad = p.grad.redistribute(placements=p.placements)


def parallelize_variant(
    model: TitanTransformer, parallel_dims: Any, job: JobConfig, config: Any
) -> TitanTransformer:
    """Parallelizes the model for TorchTitan's trainer. config: as for `parallelize`."""
    with (
        unset_fake_temporarily()
    ):  # TorchTitan's memory estimator calls this in a mode in which no mesh can be built
        model.meshes = meshes_of(parallel_dims)
    # TorchTitan sets the time limits of its own groups after the first step; now also of these.
    add_meshes(parallel_dims, model.meshes.axes)
    model.documents = job.data.reset_state_at_documents
    parallelize(model, model.meshes, job, config, sum_in_backward=True)
    return model


class FixedWindows:
    """A rank's validation batches, the same at every iteration: windows that lie evenly over the split."""

    def __init__(self, job: JobConfig, rank: int, ranks: int, size: int) -> None:
        """size: sequences of a batch: validation.local_batch_size, or a part of it (a pipeline's micro-batch)."""
        config = job.validation
        self.dataset, self.positions = (
            open_dataset(job, "validation"),
            job.data.reset_state_at_documents,
        )
        per_pass = config.local_batch_size * ranks
        windows = windows_of(self.dataset, config.tokens)
        if windows < per_pass:
            raise ValueError(
                f"validation has {windows} windows of {config.seq_len} tokens, and one pass of all ranks takes {per_pass}. Set "
                "a smaller validation.local_batch_size or more validation.tokens."
            )
        windows -= windows % per_pass
        indices = [i * len(self.dataset) // windows for i in range(rank, windows, ranks)]
        self.batches = [indices[i : i + size] for i in range(0, len(indices), size)]

    def __iter__(self) -> Iterator[Batch]:
        return (read_batch(self.dataset, indices, self.positions) for indices in self.batches)


class VariantCurves:
    """What TorchTitan's metrics of either version log for this model: perplexity and the mixer's timescales, too.

    A base class to stand before TorchTitan's `MetricsProcessor`.
    """

    job: JobConfig
    model_parts: Any  # list[TitanTransformer], once the trainer has set it
    parallel_dims: Any
    plan: RunPlan

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        extra = dict(extra_metrics or {})
        # TorchTitan adds up what each rank has counted, and a checkpoint has one rank's count: after a resume on other
        # degrees it would be another number.
        extra["n_tokens_seen"] = step * self.plan.tokens_per_step
        extra["loss_metrics/perplexity"] = perplexity(global_avg_loss)
        freq = self.job.metrics.mixer_freq
        if freq and (step == 1 or step % freq == 0):
            extra |= mixer_statistics(self.model_parts, meshes_of(self.parallel_dims))
        # TorchTitan divides the loss of a rank's piece of the sequences by the labels of the whole sequences.
        worst_loss = global_max_loss * self.parallel_dims.cp
        log: Any = super().log  # pyright: ignore[reportAttributeAccessIssue]
        log(step, global_avg_loss, worst_loss, grad_norm, extra)


class FolderNames(StateDictAdapter):
    """Names of tensors in an exported folder, to and from: checkpoint.initial_load_in_hf, checkpoint.last_save_in_hf."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {stored_name(name): tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(BASE): tensor for name, tensor in hf_state_dict.items()}


@user_errors
def record_run(
    job: JobConfig,
    plan: RunPlan,
    data: dict[str, Any],
    tokenizer: Any,
    unknown_sections: Sequence[str] = (),
) -> None:
    """Write the run's record into its folder, on rank 0: TorchTitan's checkpoints have none of their own.

    Ends the run if TorchTitan would begin at step 1 and overwrite halves of copied checkpoints.

    unknown_sections: sections of the configuration that are left out, because the run has TorchTitan's own component.
    """
    if job.checkpoint.enable and dist.get_rank() == 0:
        folder = Path(job.job.dump_folder)
        check_half_copies(folder / job.checkpoint.folder)
        record = describe_run(plan, job, data, tokenizer)
        for section in unknown_sections:
            del record["configuration"][section]
        write_record(folder, record, tokenizer)
        note_folders(folder, job.checkpoint.folder, job.metrics.save_tb_folder)
