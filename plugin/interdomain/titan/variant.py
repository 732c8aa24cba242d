"""The model for TorchTitan's own trainer: what 0.2.2 (`spec`) and 0.3.0 (`spec_0_3`) share.

Shapes: B sequences, T tokens of a sequence on this rank.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Replicate, Shard

from interdomain.checkpoint.pretrained import MODEL_PREFIX, stored_name
from interdomain.checkpoint.run_folder import note_folders
from interdomain.checkpoint.step_folder import write_record
from interdomain.model import Transformer
from interdomain.model.initialize import initialize
from interdomain.model.state import ModelState

from .data.dataloader import Batch, read_batch
from .data.folders import open_dataset
from .errors import user_errors
from .host import StateDictAdapter, logger
from .host.patches import add_meshes
from .parallelize import parallelize, set_initial_values, ssm_modules
from .plan.device import device_here
from .plan.run_plan import RunPlan
from .resume.checkpoint import describe_run
from .resume.resume_from import check_half_copies, check_resume_of_torchtitan
from .settings.schema import JobConfig
from .step.meshes import Meshes, meshes_of
from .watch.metrics import mixer_statistics, perplexity
from .watch.validate import windows_of


class TitanTransformer(Transformer):
    """The model as TorchTitan's trainer calls it: tokens -> logits of the whole vocabulary.

    Attributes:
        meshes: The process groups. None until `parallelize_variant`: scripts and notebooks build a
            model on one device.
        resets_at_documents: True if positions say where documents begin. Otherwise they only count the
            tokens, as the model does by itself.
        whole_logits: True if the loss takes the logits of the whole vocabulary. Otherwise it takes
            this tensor-parallel rank's columns.
        freqs_cis: TorchTitan's validator reads it under context parallelism, and does not use it.
    """

    meshes: Meshes | None = None
    resets_at_documents = False
    whole_logits = True
    freqs_cis = None

    def __init__(self, plan: Any) -> None:
        """Builds the model.

        Args:
            plan: A `RunPlan` or TorchTitan's model arguments, with `config`, `execution` and
                `seed`.
        """
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
        """Computes logits from tokens.

        A stage of a pipeline takes and returns hidden states, [B, T, dim]: the first stage takes
        tokens, and the last one returns logits.

        Args:
            tokens: Token ids, [B, T].
            state: Not used in training. The model's state to continue from.
            positions: Position of each token in its document, [B, T]. Only used with `resets_at_documents`.
            last: Not used in training. The number of last positions whose logits are returned.
            labels: Not used by TorchTitan, which computes the loss from logits.

        Returns:
            Logits, [B, T, vocab_size], or this tensor-parallel rank's columns of them.
        """
        if not self.resets_at_documents:
            positions = None
        # `training.precision` says what is rounded, not autocast.
        with torch.autocast(tokens.device.type, enabled=False):
            out = super().forward(tokens, state, positions, last=last, labels=labels)
        if self.tp_rank is None or self.output is None or not self.whole_logits:
            return out

        # Gather the columns of all tensor-parallel ranks. Each of them computes the whole loss, and
        # so has the whole gradient of the logits.
        assert self.meshes is not None
        columns = DTensor.from_local(out, self.meshes.tensor, [Shard(2)], run_check=False)
        return columns.full_tensor(grad_placements=[Replicate()])

    def init_weights(self, seed: Any = None, buffer_device: torch.device | None = None) -> None:
        """Sets the initial values.

        Args:
            seed: Not used. The seed is that of the plan.
            buffer_device: Device of the forward pass. None: this rank's.
        """
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
        # TorchTitan's step has no place for this plugin's sum of the gradients over the ranks.
        for ssm in ssm_modules(self):
            for p in ssm.parameters():
                p.register_post_accumulate_grad_hook(_sum_gradient)

    def verify_module_protocol(self) -> None:
        """Does nothing. TorchTitan 0.3 asks for its own modules; `parallelize` needs none."""

    def get_attention_masks(self, *args: Any, **kwargs: Any) -> None:
        """Raises the error that TorchTitan's validator expects of a model without masks."""
        raise TypeError("this model takes no attention masks")


def _sum_gradient(p: Any) -> None:
    """Sums the gradient of an SSM parameter over the ranks, after each backward pass.

    Args:
        p: The parameter, whole on every rank. Its gradient is this rank's share (`Partial`).
    """
    p.grad = p.grad.redistribute(placements=p.placements)


def parallelize_variant(
    model: TitanTransformer, parallel_dims: Any, job: JobConfig, config: Any
) -> TitanTransformer:
    """Parallelizes the model for TorchTitan's trainer.

    Args:
        model: The model or a stage of a pipeline, on the meta device.
        parallel_dims: TorchTitan's degrees of parallelism.
        job: This plugin's configuration.
        config: The configuration whose sections [activation_checkpoint] and [compile] TorchTitan's
            functions read.
    """
    # TorchTitan's memory estimator calls this with fake tensors, under which no mesh can be built.
    with unset_fake_temporarily():
        model.meshes = meshes_of(parallel_dims)
    # TorchTitan shortens the timeouts of its process groups after the first step. Now it shortens
    # those of this plugin's groups, too.
    add_meshes(parallel_dims, model.meshes.axes)
    model.resets_at_documents = job.data.reset_state_at_documents
    # TorchTitan's step has no place for `reduce_shares`, so the backward pass sums over the ranks.
    parallelize(model, model.meshes, job, config, sum_in_backward=True)
    return model


class FixedWindows:
    """A rank's batches of a validation: the same windows every time, evenly over the split."""

    def __init__(self, job: JobConfig, rank: int, ranks: int, size: int) -> None:
        """Chooses the windows.

        Args:
            job: The configuration of the run.
            rank: This rank's number among the data-parallel ranks.
            ranks: Number of data-parallel ranks.
            size: Sequences of a batch: validation.local_batch_size, or a pipeline's micro-batch.

        Raises:
            ValueError: The split has fewer windows than all ranks take in one pass.
        """
        self.dataset = open_dataset(job, "validation")
        self.positions = job.data.reset_state_at_documents
        per_pass = job.validation.local_batch_size * ranks
        windows = windows_of(self.dataset, job.validation.tokens)
        if windows < per_pass:
            raise ValueError(
                f"validation has {windows} windows of {job.validation.seq_len} tokens, and one pass of all ranks takes "
                f"{per_pass}. Set a smaller validation.local_batch_size or more validation.tokens."
            )
        # Only whole passes: TorchTitan divides by the same number of labels in each.
        windows -= windows % per_pass
        indices = [n * len(self.dataset) // windows for n in range(rank, windows, ranks)]
        self.batches = [indices[i : i + size] for i in range(0, len(indices), size)]

    def __iter__(self) -> Iterator[Batch]:
        for indices in self.batches:
            yield read_batch(self.dataset, indices, self.positions)


class VariantMetricsBase:
    """Adds perplexity, tokens and SSM statistics to TorchTitan's metrics.

    A subclass has TorchTitan's `MetricsProcessor` as its second base, and sets `job` and `plan`.
    TorchTitan's trainer sets `model_parts`.
    """

    job: JobConfig
    model_parts: Any  # list[TitanTransformer]
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
        """Logs a training step. TorchTitan calls this.

        Args:
            step: The step that was taken.
            global_avg_loss: Mean loss per token over all ranks.
            global_max_loss: Mean loss per token of the rank where it is highest.
            grad_norm: Norm of all gradients before clipping.
            extra_metrics: Further scalars by tag.
        """
        extra = dict(extra_metrics or {})
        # TorchTitan sums what the ranks have counted. After a resume with other degrees of
        # parallelism this is wrong, because a checkpoint has the count of one rank.
        extra["n_tokens_seen"] = step * self.plan.tokens_per_step
        extra["loss_metrics/perplexity"] = perplexity(global_avg_loss)
        freq = self.job.metrics.mixer_freq
        if freq and (step == 1 or step % freq == 0):
            extra |= mixer_statistics(self.model_parts, meshes_of(self.parallel_dims))
        # TorchTitan divides the loss of a rank's tokens by the labels of whole sequences.
        worst_loss = global_max_loss * self.parallel_dims.cp
        log: Any = super().log  # pyright: ignore[reportAttributeAccessIssue]
        log(step, global_avg_loss, worst_loss, grad_norm, extra)


class ExportedNames(StateDictAdapter):
    """Converts names of tensors to and from those of an exported model.

    TorchTitan uses it for checkpoint.initial_load_in_hf and checkpoint.last_save_in_hf.
    """

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {stored_name(name): tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in hf_state_dict.items()}


def warn_of_last_checkpoint(checkpoint: Any) -> None:
    """Logs a warning if TorchTitan's trainer will save only weights after the last step.

    Args:
        checkpoint: TorchTitan's section [checkpoint].
    """
    if checkpoint.enable and checkpoint.last_save_model_only:
        logger.warning(
            "checkpoint.last_save_model_only is on, as TorchTitan has it by default: the last "
            "checkpoint will hold only weights, and no run can continue from it. To be able to train "
            "on, set it to false."
        )


@user_errors
def record_run(
    job: JobConfig,
    plan: RunPlan,
    data: dict[str, Any],
    tokenizer: Any,
    left_out: Sequence[str] = (),
) -> None:
    """Writes the run's record (`interdomain.json`) into its folder, on rank 0.

    TorchTitan's checkpoints have no records of their own.

    Args:
        job: The configuration of the run.
        plan: Its plan.
        data: Facts of the training data.
        tokenizer: This package's tokenizer, which is written, too.
        left_out: Sections of the configuration that do not describe this run, because it has
            TorchTitan's own component.

    Raises:
        SystemExit: A checkpoint is a half copy: TorchTitan would begin at step 1, and overwrite it.
            Or the one to continue from holds only weights.
    """
    if job.checkpoint.enable and dist.get_rank() == 0:
        folder = Path(job.job.dump_folder)
        checkpoints = folder / job.checkpoint.folder
        check_half_copies(checkpoints)
        check_resume_of_torchtitan(job.checkpoint, checkpoints)
        record = describe_run(plan, job, data, tokenizer)
        for section in left_out:
            del record["configuration"][section]
        write_record(folder, record, tokenizer)
        note_folders(folder, job.checkpoint.folder, job.metrics.save_tb_folder)
