"""python tests/tools/fsdp_checkpoint.py FOLDER TOKENIZER: a checkpoint of a model sharded by FSDP2, by two ranks.

The ranks are forks, which share the imports.
"""

import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[2]))
from interdomain.data import load_tokenizer
from interdomain.model import Transformer
from tests.model.common import small_config
from tests.tools.checkpoints import VOCAB, write_record

RANKS = 2


def run(rank: int, folder: Path, tokenizer: Path) -> None:
    meet = f"file://{folder.parents[2] / 'ranks'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    # 3 heads on 2 ranks: uneven shards, and an empty one where a tensor has a single row.
    config = small_config("interdomain", vocab_size=VOCAB, dim=24, n_heads=3, feature_map="rff", n_kv_heads=1)
    with torch.device("meta"):
        model = Transformer(config)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.init_weights(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    if dist.get_rank() == 0:
        write_record(folder, config, load_tokenizer(tokenizer), step=1)
    dist.barrier()
    moments = {f"optimizer.{i}": s["exp_avg"] for i, s in enumerate(optimizer.state.values())}
    dcp.save({**model.state_dict(), **moments}, checkpoint_id=folder)
    dist.destroy_process_group()


def main(folder: Path, tokenizer: Path) -> int:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=(rank, folder, tokenizer)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return any(rank.exitcode for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
