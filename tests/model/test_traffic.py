"""The tensors of a rank and the bytes that it receives in a step against numbers written out: a configuration for each axis."""

import pytest

from interdomain.model import build_config, count_parameters, meta_model
from interdomain.model.costs.traffic import held, traffic

# debug: 4 layers of width 128, 4 heads of 32, M = 32, feed-forward 384, vocabulary 2048
DIM, LAYERS, MATRICES = 128, 4, 4 * 128**2 + 3 * 128 * 384  # of a block with softmax, beside two norms
EMBEDDING, B, T = 2048 * 128, 2, 256
WHOLE = [["tok_embeddings", *(f"layers.{i}" for i in range(LAYERS)), "norm", "output"]]
ALONE = dict(replicas=1, shards=1, context=1, tensor=1, local_batch=B, seq_len=T, micro_batches=1, precision="float32")
ALONE |= dict(checkpointing="none", gathers=1, head_gathers=1)


def received(condition, stages=WHOLE, **settings):
    """The axes that receive anything."""
    config = build_config("debug", condition)
    own = held(meta_model(config), stages, settings.get("tensor", 1))
    return {axis: n for axis, n in traffic(config, own, **{**ALONE, **settings}).items() if n}


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_stages_hold_is_the_model(tensor):
    model = meta_model(build_config("debug", "interdomain", output_gate=True))
    stages = [WHOLE[0][:3], WHOLE[0][3:4], WHOLE[0][4:]]
    each = [held(model, [stage], tensor) for stage in stages]
    split = sum(p.numel() for p in model.parameters() if p.ndim == 2 and min(p.shape) >= DIM)
    matrices = [rows * n for own in each for group in own.groups for rows, n, part in group if part]
    assert sum(matrices) == split // tensor
    assert sum(own.parameters for own in each) == count_parameters(model) - split + split // tensor
    assert [(own.layers, own.embedding, own.head) for own in each] == [
        (((0, 1),), True, False),
        (((2,),), False, False),
        (((3,),), False, True),
    ]
    assert held(model, [stages[0], stages[2]]).layers == ((0, 1), (3,))  # of one rank


def test_shards_and_replicas():
    """Parameters in bf16, three micro-batches, each forward and backward, the head once; gradients once, in float32."""
    block, head = MATRICES + 2 * DIM, EMBEDDING + DIM
    settings = dict(precision="bf16", micro_batches=3, gathers=6, head_gathers=3)
    gathered = 2 * (6 * (EMBEDDING + LAYERS * block) + 3 * head)
    gradients = 4 * (EMBEDDING + LAYERS * block + head)
    assert received("softmax", shards=4, **settings) == {"shards": (gathered + gradients) * 3 // 4}
    both = received("softmax", shards=4, replicas=2, **settings)
    assert both == {"shards": (gathered + gradients) * 3 // 4, "replicas": gradients // 4}  # 2 x 1 / 2
    padded = received("softmax", shards=3)["shards"]  # 128 rows are 3 x 43, 2048 are 3 x 683, 384 are 3 x 128
    block = (4 * 129 * 128) + (2 * 384 * 128 + 129 * 384) + 2 * 129
    assert padded == (2 * 2049 * 128 + LAYERS * block + 129) * (4 + 4) * 2 // 3


def test_context():
    """Both ways, of each of three other ranks: a fourth of a state in float32 twice, and a number that says if it goes on; and
    of one of them the convolutions' inputs."""
    state, tail = 2 * 4 * 32 * 64 * 2 + 4, 3 * 2 * DIM
    fsdp = received("interdomain", shards=4, precision="bf16")
    got = received("interdomain", context=4, precision="bf16")
    dynamics = LAYERS * 4 * (1 + 2 * 32 + 2 * 32**2)
    assert got.pop("context") == 2 * LAYERS * B * (3 * state + tail)
    assert got == fsdp == {"shards": fsdp["shards"], "dynamics": 4 * dynamics * 2 * 3 // 4}


def test_tensor():
    """Half of the hidden states in 8 collectives of a block and 4 beside, a normaliser per token, and the norms' gradients."""
    hidden, norms = B * T * DIM // 2, 4 * (2 * LAYERS + 1) * DIM
    got = received("softmax", tensor=2, micro_batches=3)
    assert got == {"tensor": 3 * (4 * hidden * (8 * LAYERS + 4) + 4 * B * T) + norms}
    mixed = received("softmax", tensor=2, precision="bf16-products")["tensor"]  # the embedding's are float32
    assert mixed == 2 * hidden * (8 * LAYERS + 2) + 4 * hidden * 2 + 4 * B * T + norms
    stage = received("softmax", [["layers.1"]], tensor=4, context=2)
    assert stage["tensor"] == 3 * 4 * (B * T // 2 * DIM // 4) * 8 + 4 * DIM * 2 * 3 // 4  # norms' gradients: two shards
    assert received("interdomain", tensor=2)["dynamics"] == received("interdomain", shards=2)["dynamics"]


def test_pipeline():
    hidden = 4 * B * T * DIM
    for stages, times in (
        ([["tok_embeddings", "layers.0"]], 1),
        ([["layers.1"]], 2),
        ([["norm", "output"]], 1),
        ([["tok_embeddings"], ["layers.2"]], 3),
    ):
        assert received("softmax", stages, micro_batches=3) == {"pipeline": 3 * times * hidden}
    assert received("softmax", [["layers.1"]], tensor=2, context=2)["pipeline"] == 2 * hidden // 4
