"""Validation loss and perplexity over the same fixed tokens every time, whatever the topology."""

import math
import time

import torch
from torch.distributed.fsdp import FSDPModule

from .checkpoint import SelfDescribingCheckpoints
from .corpora import open_dataset
from .device import device_here
from .errors import one_paragraph
from .host import IGNORE_INDEX, BaseValidator, dist_sum, logger
from .metrics import perplexity


class FixedValidator(BaseValidator):
    """Mean loss per token over the first windows of the validation split, in order; ranks share them round robin.

    Runs at step 1 (the model is all but untrained), every `validation.freq` steps, and after the last step. A run that ended
    between a save and its validation makes up for it when it is started again (`make_up`).

    Args:
        checkpoints: beside which the results are noted.
    """

    def __init__(
        self,
        *,
        job_config,
        dp_world_size,
        dp_rank,
        parallel_dims,
        loss_fn,
        metrics_processor,
        checkpoints: SelfDescribingCheckpoints,
    ) -> None:
        super().__init__(job_config)
        self.checkpoints = checkpoints
        self.parallel_dims, self.loss_fn, self.metrics_processor = parallel_dims, loss_fn, metrics_processor
        self.rank, self.ranks = dp_rank, dp_world_size
        self.dataset = open_dataset(job_config, "validation")
        self.positions = job_config.data.reset_state_at_documents
        config = job_config.validation
        self.windows = len(self.dataset)
        if config.tokens:
            asked = math.ceil(config.tokens / config.seq_len)
            if asked > self.windows:
                logger.warning(
                    "validation.tokens = %d is more than the split holds; using all of its %d windows of %d tokens.",
                    config.tokens,
                    self.windows,
                    config.seq_len,
                )
            self.windows = min(asked, self.windows)

    def should_validate(self, step: int) -> bool:
        return super().should_validate(step) or step == self.job_config.training.steps

    def make_up(self, model_parts, step: int) -> None:
        """Validate the step that the run continues from, if that was due and never came to its end. Tried once. Collective."""
        if not (step and self.should_validate(step) and self.checkpoints.claim_validation(step)):
            return
        if self._changes_the_steps_after(step):
            logger.warning(
                "step %d was saved and not validated, and is not now: with compile.enable, validation of another batch size or "
                "length than training's cannot come first.",
                step,
            )
            return
        logger.info("step %d was saved and not validated: validating it now", step)
        self.metrics_processor.time_last_log = time.perf_counter()
        self.validate(model_parts, step)

    def _changes_the_steps_after(self, step: int) -> bool:
        """torch.compile makes general code for the second shape that it meets: were that the training step's, its sums would be
        in another order than without the restart."""
        config = self.job_config
        shapes = {(part.local_batch_size, part.seq_len) for part in (config.training, config.validation)}
        return config.compile.enable and len(shapes) > 1 and step < config.training.steps

    def _batches(self):
        """This rank's share, ({"input": [B, T], ...}, labels [B, T]) as the loader gives; the last batches are filled up with
        ignored windows so that every rank makes the same number of forward passes (FSDP2's are collective)."""
        per_pass = self.job_config.validation.local_batch_size * self.ranks
        for first in range(0, self.windows, per_pass):
            mine = range(first + self.rank, first + per_pass, self.ranks)
            indices = [min(i, self.windows - 1) for i in mine]
            rows = torch.from_numpy(self._read(indices))
            labels = rows[:, 1:].clone()
            labels[torch.tensor([i >= self.windows for i in mine])] = IGNORE_INDEX
            inputs = {"input": rows[:, :-1]}
            if self.positions:
                inputs["positions"] = torch.stack([torch.from_numpy(self.dataset.positions(i)) for i in indices])
            inputs = {name: tensor.to(device_here()) for name, tensor in inputs.items()}
            yield inputs, labels.to(device_here())

    @one_paragraph
    def _read(self, indices: list[int]):
        return self.dataset.read_batch(indices)

    @torch.no_grad()
    def validate(self, model_parts, step: int) -> None:
        (model,) = model_parts
        model.eval()
        # Sums in float64: the result must not depend on how the windows are split over ranks.
        loss = torch.zeros((), dtype=torch.float64, device=device_here())
        tokens = torch.zeros((), dtype=torch.float64, device=device_here())
        for inputs, labels in self._batches():
            loss += self.loss_fn(model(inputs.pop("input"), **inputs), labels)
            tokens += (labels != IGNORE_INDEX).sum()
            self.metrics_processor.ntokens_since_last_log += labels.numel()
        mesh = self.parallel_dims.get_optional_mesh("loss")
        mean = dist_sum(loss, mesh) / dist_sum(tokens, mesh)
        self.metrics_processor.log_validation(mean, step, extra_metrics=self._readout_rms(model))
        self.checkpoints.note_validation(step, mean, perplexity(mean))
        _reshard(model)
        model.train()

    @torch.no_grad()
    def _readout_rms(self, model) -> dict[str, float]:
        """Root mean square of each mixer's readout (the input of wo) on the first validation window of this rank."""
        rms, hooks = {}, []
        for i, layer in enumerate(model.layers.values()):

            def record(module, args, i=i):
                rms[i] = args[0].float().square().mean().sqrt().item()

            hooks.append(layer.attention.wo.register_forward_pre_hook(record))
        try:
            inputs, _ = next(self._batches())
            inputs = {name: tensor[:1] for name, tensor in inputs.items()}
            with torch.compiler.set_stance("force_eager"):  # hooks inside compiled blocks would not run
                model(inputs.pop("input"), **inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return {f"mixer/layer_{i:02d}/readout_rms": value for i, value in rms.items()}


def _reshard(model) -> None:
    """As the backward pass leaves the parameters, which the groups that are needed again in it keep whole until then.

    A checkpoint may be saved next, and whole parameters are not those that the optimizer's state is of.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@one_paragraph
def build_validator(**kwargs) -> FixedValidator:
    return FixedValidator(**kwargs)
