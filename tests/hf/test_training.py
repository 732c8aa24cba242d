"""Fine-tuning: by hand, compiled, with checkpointing, sharded by layer, and through Trainer."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from interdomain.checkpoint.pretrained import stored_name

from ..model.common import assert_same_tensors
from .common import GREEDY, code_of, each_case, each_kind, padded, padded_batch, random_texts


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters()}


@each_case
def test_loss_and_gradients_behind_padding(native, there, case):
    """Rows of unequal length give the gradients of single rows. Padding has no part in the loss.

    The models are float64; transformers computes the loss in float32.
    """
    native = copy.deepcopy(native).double()
    there = copy.deepcopy(there).double().train()
    rows = [random_texts(1, n, seed=n) for n in (5, 12)]
    losses = [F.cross_entropy(native(row)[0, :-1], row[0, 1:], reduction="sum") for row in rows]
    loss = sum(losses) / 15
    loss.backward()
    wanted = {stored_name(name): gradient for name, gradient in gradients_of(native).items()}
    for side in ("left", "right"):
        tokens, mask = padded(rows, side)
        labels = tokens.masked_fill(mask == 0, -100)
        # Trainer passes its count of labels.
        count = (labels[:, 1:] != -100).sum()
        for options in ({"labels": tokens}, {"labels": labels, "num_items_in_batch": count}):
            there.zero_grad()
            out = there(tokens, attention_mask=mask, **options)
            out.loss.backward()
            assert out.past_key_values is None
            assert out.loss.item() == pytest.approx(loss.item(), rel=1e-6)
            torch.testing.assert_close(gradients_of(there), wanted, rtol=1e-5, atol=1e-7)


def gradients(model, forward, longest=12):
    """Returns the gradients of a left-padded batch."""
    tokens, mask = padded_batch(longest)
    model.zero_grad()
    forward(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
    return gradients_of(model)


def test_torch_compile(loaded, monkeypatch):
    """Two chunks in plain PyTorch are one graph, in evaluation, too, in which there is a cache."""
    torch._dynamo.reset()
    there = copy.deepcopy(loaded("interdomain")[1]).double()
    del there.model.layers[1:]
    monkeypatch.setattr(code_of(there, "plain"), "HAS_PACKAGE", False)
    compiled = torch.compile(there, backend="aot_eager", fullgraph=True)
    wanted = gradients(there, there, longest=70)
    found = gradients(there, compiled, longest=70)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_(enable|disable). is deprecated")
@pytest.mark.filterwarnings("ignore:.*use_reentrant")
@pytest.mark.parametrize("options", [None, {"use_reentrant": True}], ids=str)
@each_kind
def test_gradient_checkpointing(there, options):
    """Layers are computed twice, and gradients are the same. A cache is refused in training."""
    there = copy.deepcopy(there).double().train()
    hook = mock.Mock(return_value=None)
    there.model.layers[1].feed_forward.w1.register_forward_hook(hook)
    wanted = gradients(there, there)
    assert hook.call_count == 1
    there.gradient_checkpointing_enable(options)
    torch.testing.assert_close(gradients(there, there), wanted)
    assert hook.call_count == 1 + 2
    # Trainer evaluates without switching checkpointing off.
    tokens = random_texts(2, 9)
    assert there.eval().generate(tokens, max_new_tokens=2, **GREEDY).shape == (2, 11)
    cache = there(tokens).past_key_values
    with pytest.raises(ValueError, match="gradient checkpointing reads"):
        there.train()(tokens, past_key_values=cache)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A process group of only this process."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard(model, mesh, policy):
    """Applies FSDP2 as docs/checkpoints.md does. A wrapper finds layers by name."""
    layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    assert len(layers) == model.config.num_hidden_layers
    for module in model.float32_modules():
        fully_shard(module, mesh=mesh)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def loss_in_two_pieces(model, cache):
    """Returns the loss of two pieces that the caller's cache connects."""
    tokens = random_texts(2, 9)
    pieces = [model(piece, past_key_values=cache).logits for piece in tokens.split([4, 5], dim=1)]
    assert cache.get_seq_length() == 9
    return F.cross_entropy(torch.cat(pieces, dim=1).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("case", ["interdomain", "all", "s4d", "softmax", "mamba2"])
def test_a_cache_under_fsdp2_with_mixed_precision(there, mesh):
    """FSDP2 hands a layer copies of its arguments; the caller's cache still advances."""
    plain = copy.deepcopy(there).train()
    policy = MixedPrecisionPolicy(torch.float32, output_dtype=torch.float32)
    sharded = shard(copy.deepcopy(plain), mesh, policy)
    cache_class = code_of(plain).InterdomainCache
    loss_in_two_pieces(plain, cache_class()).backward()
    loss_in_two_pieces(sharded, cache_class()).backward()
    found = {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}
    torch.testing.assert_close(found, gradients_of(plain))


@pytest.mark.parametrize("case", ["interdomain", "mamba2"])
@torch.no_grad()
def test_the_recurrence_stays_float32_under_fsdp2(there, mesh):
    """A model refuses to compute with rounded SSM parameters. A group of their own keeps them."""
    policy = MixedPrecisionPolicy(torch.bfloat16)
    rounded = copy.deepcopy(there)
    for layer in rounded.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    with pytest.raises(ValueError, match=r"must stay float32.*float32_modules"):
        rounded(random_texts(2, 9))

    def check_dtype(module, args, output):
        assert module.weight.dtype == torch.bfloat16

    sharded = shard(copy.deepcopy(there), mesh, policy)
    sharded.model.layers[0].attention.wo.register_forward_hook(check_dtype)
    sharded(random_texts(2, 9))


def test_a_cache_under_ddp(loaded, mesh, monkeypatch):
    """DDP rebuilds results that pytree takes apart. The cache comes back as the same object."""
    there = copy.deepcopy(loaded("interdomain")[1]).train()
    cache_class = code_of(there).InterdomainCache
    # An export in another test registers the class with pytree.
    monkeypatch.delitem(pytree.SUPPORTED_NODES, cache_class, raising=False)
    cache = cache_class()
    model = torch.nn.parallel.DistributedDataParallel(there, static_graph=True)
    assert model(random_texts(2, 9), past_key_values=cache).past_key_values is cache
    assert cache.get_seq_length() == 9


def test_classification(exported):
    """The head reads each row's last token, on whichever side the padding is."""
    transformers = pytest.importorskip("transformers")
    native, folder = exported("interdomain")
    torch.manual_seed(0)
    there = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, trust_remote_code=True, num_labels=3
    )
    assert torch.equal(there.model.norm.weight, native.norm.weight)
    rows = [random_texts(1, 5), random_texts(1, 12, seed=2)]
    labels = torch.tensor([0, 2])
    single = torch.cat([there(row).logits for row in rows])
    for side in ("left", "right"):
        tokens, mask = padded(rows, side, value=there.config.pad_token_id)
        out = there(tokens, attention_mask=mask, labels=labels)
        torch.testing.assert_close(out.logits, single, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out.loss, F.cross_entropy(single, labels))


def test_trainer(tmp_path, loaded):
    """The loss falls in a few steps, and the saved model loads with the new weights."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, of the extra `eval`")
    pytest.importorskip(
        "datasets", reason="Trainer needs a datasets of its own age, or none", exc_type=ImportError
    )
    tuned = copy.deepcopy(loaded("interdomain")[1])
    rows = [{"input_ids": row, "labels": row} for row in random_texts(8, 16).tolist()]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_checkpointing=True,
        learning_rate=1e-2,
        save_steps=12,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        model=tuned, args=arguments, train_dataset=rows, eval_dataset=rows
    )
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 6 < first
    folder = tmp_path / "run" / "checkpoint-12"
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert_same_tensors(saved.state_dict(), tuned.state_dict())
