"""Fine-tuning: by hand, compiled, with checkpointing, sharded layer by layer, and through Trainer."""

import copy
import functools
import importlib
import socket
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from interdomain.checkpoint.pretrained import stored_name

from ..model.common import assert_same_tensors, random_tokens, variant
from .common import ON, code_of, each_case, each_kind, padded, random_texts


@pytest.mark.parametrize("side", ["left", "right"])
@each_case
def test_loss_and_gradients_behind_padding(loaded, case, side):
    """Rows of unequal length give the gradients of single rows: padding and what it predicts have no part in the loss.

    In float64, but for the loss, which transformers computes in float32.
    """
    native, there = (copy.deepcopy(model).double() for model in loaded(case))
    rows = [random_texts(1, n, seed=n) for n in (5, 12)]
    losses = [F.cross_entropy(native(row)[0, :-1], row[0, 1:], reduction="sum") for row in rows]
    (sum(losses) / 15).backward()
    tokens, mask = padded(rows, side)
    out = there.train()(tokens, attention_mask=mask, labels=tokens)
    torch.testing.assert_close(out.loss.double(), sum(losses) / 15, rtol=1e-6, atol=1e-6)
    assert out.past_key_values is None
    labels = tokens.masked_fill(
        mask == 0, -100
    )  # as a collator makes them, and counted as Trainer does
    counted = there(
        tokens, attention_mask=mask, labels=labels, num_items_in_batch=(labels[:, 1:] != -100).sum()
    )
    torch.testing.assert_close(counted.loss, out.loss)
    out.loss.backward()
    wanted = {stored_name(name): p.grad for name, p in native.named_parameters()}
    found = {name: p.grad for name, p in there.named_parameters()}
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def backward(model, forward, **inputs):
    model.zero_grad()
    out = forward(**inputs)
    out.loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def batch(longest=12):
    tokens, mask = padded([random_texts(1, 7), random_texts(1, longest, seed=2)], "left")
    return dict(input_ids=tokens, attention_mask=mask, labels=tokens)


def test_torch_compile(loaded, monkeypatch):
    """One graph, with gradients on a left-padded batch of two chunks, in plain PyTorch; in evaluation, for there is then a
    cache, too."""
    torch._dynamo.reset()
    there = copy.deepcopy(loaded("interdomain")[1]).double()
    del there.model.layers[1:]
    monkeypatch.setattr(code_of(there, "plain"), "HAS_PACKAGE", False)
    wanted = backward(there, there, **batch(70))
    found = backward(there, torch.compile(there, backend="aot_eager", fullgraph=True), **batch(70))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_(enable|disable). is deprecated")
@pytest.mark.filterwarnings("ignore:.*use_reentrant")
@pytest.mark.parametrize("options", [None, dict(use_reentrant=True)], ids=str)
@each_kind
def test_gradient_checkpointing(there, options):
    """Layers are computed twice, with the same gradients, also behind padding, and of the SSM parameters."""
    there = copy.deepcopy(there).double().train()
    calls = []
    there.model.layers[1].feed_forward.w1.register_forward_hook(lambda *_: calls.append(1))
    wanted = backward(there, there, **batch())
    there.gradient_checkpointing_enable(options)
    found = backward(there, there, **batch())
    assert len(calls) == 1 + 2
    with pytest.raises(ValueError, match="gradient checkpointing reads"):
        there(
            random_texts(2, 9),
            past_key_values=copy.deepcopy(there).eval()(random_texts(2, 9)).past_key_values,
        )
    torch.testing.assert_close(found, wanted)
    text = there.eval().generate(
        random_texts(2, 9), max_new_tokens=2, do_sample=False
    )  # as Trainer evaluates
    assert text.shape == (2, 11)


@pytest.fixture(scope="module")
def mesh():
    """A process group of this process alone."""
    import torch.distributed as dist

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard(model, mesh, dtype=None, **policy):
    """FSDP2 as the page on checkpoints has it. A wrapper finds layers by name."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, **policy)
    layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    assert len(layers) == model.config.num_hidden_layers
    for module in model.float32_modules():
        fully_shard(module, mesh=mesh)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


@pytest.mark.parametrize("case", ["interdomain", "all", "s4d", "softmax", "mamba2"])
def test_a_cache_under_fsdp2_with_mixed_precision(there, mesh):
    """FSDP2 casts what it can take apart, and hands a layer the copy: the cache that a layer advances is still the caller's."""
    wanted = there.generate(random_texts(2, 9), max_new_tokens=8, **ON)
    sharded = shard(copy.deepcopy(there), mesh, torch.float32, output_dtype=torch.float32)
    found = sharded.generate(random_texts(2, 9), max_new_tokens=8, **ON)
    assert torch.equal(found, wanted)
    inputs = dict(input_ids=random_texts(2, 9), labels=random_texts(2, 9))
    cache_class = code_of(there).InterdomainCache
    expected = backward(there.train(), in_pieces(there, cache_class()), **inputs)
    there.eval()
    found = backward(sharded.train(), in_pieces(sharded, cache_class()), **inputs)
    torch.testing.assert_close(
        {name: gradient.full_tensor() for name, gradient in found.items()}, expected
    )


def in_pieces(model, cache):
    """A forward pass in two pieces, with the caller's cache."""

    def forward(input_ids, labels):
        parts = [model(x, past_key_values=cache).logits for x in input_ids.split([4, 5], dim=1)]
        assert cache.get_seq_length() == 9
        logits = torch.cat(parts, dim=1)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    return forward


@pytest.mark.parametrize("condition", ["interdomain", "softmax", "mamba2"])
@torch.no_grad()
def test_a_state_of_the_package_under_fsdp2(condition, mesh):
    """Also a state that the package's own layers advance is the caller's."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = variant(condition, dtype=torch.float32)
    tokens = random_tokens(model.config, 2, 9)
    wanted, state = model(tokens), model.init_state(2)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    pieces = [model(piece, state) for piece in tokens.split([4, 3, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["interdomain", "mamba2"])
@torch.no_grad()
def test_the_recurrence_stays_float32_under_fsdp2(there, mesh):
    """Its parameters are not rounded where they have a group of their own; else the model refuses to compute."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    rounded = copy.deepcopy(there)
    for layer in rounded.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    with pytest.raises(ValueError, match=r"must stay float32.*float32_modules"):
        rounded(random_texts(2, 9))
    dtypes = []
    sharded = shard(copy.deepcopy(there), mesh, torch.bfloat16)
    sharded.model.layers[0].attention.wo.register_forward_hook(
        lambda module, *_: dtypes.append(module.weight.dtype)
    )
    sharded(random_texts(2, 9))
    assert dtypes == [torch.bfloat16]


@pytest.mark.parametrize(
    "options", [dict(static_graph=True), dict(find_unused_parameters=True)], ids=str
)
def test_a_cache_under_ddp(loaded, options, mesh, monkeypatch):
    """DDP rebuilds a result of what it can take apart: the cache comes back as it was, with all that it has read."""
    there = copy.deepcopy(loaded("interdomain")[1]).train()
    cache_class = code_of(there).InterdomainCache
    monkeypatch.delitem(
        pytree.SUPPORTED_NODES, cache_class, raising=False
    )  # where another test has exported the model
    cache = cache_class()
    out = torch.nn.parallel.DistributedDataParallel(there, **options)(
        random_texts(2, 9), past_key_values=cache
    )
    assert out.past_key_values is cache
    assert cache.get_seq_length() == 9


@torch.no_grad()
def test_replicas_of_data_parallel_return_no_cache(loaded):
    """nn.DataParallel joins the results of its replicas, and cannot join caches. It marks a replica so."""
    there = copy.deepcopy(loaded("interdomain")[1])
    there.model._is_replica = True
    assert there(random_texts(2, 9), use_cache=True).past_key_values is None


@each_kind
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_cache_that_would_be_read_again_is_refused(there, use_reentrant):
    """Checkpointing that a user puts around the layers: the second pass finds a cache that the first one has advanced."""
    from torch.utils.checkpoint import checkpoint

    there = copy.deepcopy(there).train()
    for layer in there.model.layers:
        forward = layer.attention.forward
        layer.attention.forward = functools.partial(
            checkpoint, forward, use_reentrant=use_reentrant
        )
    loss = there(random_texts(2, 9), use_cache=True).logits.square().mean()
    with pytest.raises(ValueError, match="Activation checkpointing"):
        loss.backward()
    there = copy.deepcopy(there)  # in evaluation, where each pass has a cache of its own
    wanted = backward(there, there, **batch())
    forward = functools.partial(checkpoint, there, use_reentrant=False)
    torch.testing.assert_close(backward(there, forward, **batch()), wanted)


def test_classification(exported):
    """The head reads each row's last token, on whichever side the padding is."""
    transformers = pytest.importorskip("transformers")
    native, folder = exported("interdomain")
    torch.manual_seed(0)
    there = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, trust_remote_code=True, num_labels=3
    )
    rows = [random_texts(1, 5), random_texts(1, 12, seed=2)]
    single = torch.cat([there(row).logits for row in rows])
    for side in ("left", "right"):
        tokens, kept = padded(rows, side, value=there.config.pad_token_id)
        out = there(tokens, attention_mask=kept, labels=torch.tensor([0, 2]))
        torch.testing.assert_close(out.logits, single, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out.loss, F.cross_entropy(single, torch.tensor([0, 2])))
    assert torch.equal(there.model.norm.weight, native.norm.weight)


def test_trainer(tmp_path, loaded):
    """A few steps: the loss falls, and what it saves is a folder that loads, with other weights."""
    transformers = importlib.import_module("transformers")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, of the extra `eval`")
    pytest.importorskip(
        "datasets", reason="Trainer needs a datasets of its own age, or none", exc_type=ImportError
    )
    _, there = loaded("interdomain")
    tuned = copy.deepcopy(there)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in random_texts(8, 16)]
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
        eval_strategy="steps",
        eval_steps=6,
    )
    trainer = transformers.Trainer(
        model=tuned, args=arguments, train_dataset=rows, eval_dataset=rows
    )
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 6
    arguments.label_smoothing_factor = 1e-9  # nearly none: the loss of the same labels
    given = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    smoothed = transformers.Trainer(model=tuned, args=arguments, eval_dataset=rows).compute_loss(
        tuned, dict(given)
    )
    torch.testing.assert_close(smoothed, tuned(**given).loss)
    folder = tmp_path / "run" / "checkpoint-12"
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert not torch.equal(saved.output.weight, there.output.weight)
    assert_same_tensors(saved.state_dict(), tuned.state_dict())
