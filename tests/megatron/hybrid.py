"""hybrid.py FOLDER [MEGATRON]: the first gradients of a HybridModel on this rank.

FOLDER has the checkpoint. MEGATRON is a folder with Megatron-Core 0.18 or later, if the installed
one is older.
"""

import argparse
import sys
import typing
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import typing_extensions

from tests.megatron import ranks
from tests.model.common import THETA

LAYOUTS = {  # by name: ranks of tensor parallelism, stages, the layer pattern
    "tensor and sequence": (2, 1, "G-*-G-M-"),
    "stages": (1, 2, "G-*|-G-M-"),
}
PATTERNS = ("", "G", "GG-", "G-X-", "D-G-")  # no model with these can be converted
STATE = {"n_basis": 6, "state_heads": 4}


def gradients(folder, tensor, stages, pattern):
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    from interdomain.megatron import hybrid
    from tests.megatron.loop import Run

    def make_model(config, spec, megatron):
        return HybridModel(
            megatron,
            spec,
            config.vocab_size,
            config.max_seq_len,
            hybrid_layer_pattern=pattern,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="none",
            share_embeddings_and_output_weights=False,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )

    parallel_state.initialize_model_parallel(tensor, stages)
    spec = hybrid.stack_spec("interdomain", max_seq_len=ranks.T, rope_theta=THETA, **STATE)
    run = Run(
        ranks.config_of("layers"),
        spec,
        **ranks.RATES,
        min_lr=0.0,
        warmup_steps=0,
        megatron_config=hybrid.hybrid_config,
        make_model=make_model,
        sequence_parallel=tensor > 1,
    )
    run.load_weights(folder / "release")
    run.gradients(ranks.batches_of(ranks.tokens_of(0)))
    found = ranks.own_gradients(run)
    parallel_state.destroy_model_parallel()
    return found


def refusal(pattern):
    from interdomain.megatron.hybrid import mixer_letters

    try:
        return mixer_letters(pattern)
    except ValueError as error:
        return str(error)


def flops(pattern):
    """Returns the log's FLOPs of a step of two sequences, at the width of the 125M model."""
    from interdomain.megatron import patches

    args = argparse.Namespace(
        spec=["interdomain.megatron.hybrid", "interdomain"],
        hybrid_layer_pattern=pattern,
        hidden_size=768,
        num_layers=len(pattern),
        num_attention_heads=12,
        kv_channels=64,
        layernorm_epsilon=1e-5,
        group_query_attention=False,
        padded_vocab_size=1000,
        seq_length=4096,
    )
    return patches.flops(args, 2)


def main(folder):
    warnings.simplefilter("ignore")
    typing.override = typing_extensions.override  # 0.19 wants Python 3.12
    torch.set_num_threads(1)
    from tests.megatron import cpu

    cpu.install()
    dist.init_process_group("gloo")
    found = {pattern: refusal(pattern) for pattern in PATTERNS}
    found |= {name: gradients(folder, *layout) for name, layout in LAYOUTS.items()}
    found["FLOPs"] = flops(LAYOUTS["tensor and sequence"][-1])
    torch.save(found, folder / f"gradients {dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:]
    main(Path(sys.argv[1]))
