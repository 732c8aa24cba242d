"""Samples at every validation, where metrics.samples asks for them: text that the model writes, and the maps of its mixers.

Rank 0 makes both with a copy of the whole model, in float32, whose weights all ranks send: so every kind of parallelism has
the same samples. They draw from generators of their own and change nothing of the training.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from interdomain.data import MixtureDataset, PackedDataset, Tokenizer
from interdomain.model import Transformer, meta_model
from interdomain.model.config import ModelConfig
from interdomain.model.generation import Sampling, generate
from interdomain.model.initialize import clean_name
from interdomain.model.maps import picture, read_layers

from ..plan.device import device_here
from ..step.meshes import Meshes

GIVEN, WRITTEN, MAPPED = 32, 64, 64  # tokens at most: of a prompt, of its continuation, of the text that maps are of
SAMPLING = Sampling(temperature=0.8, top_p=0.95)  # as `interdomain generate`


@torch.no_grad()
def whole_model(parts: list[Any], config: ModelConfig, meshes: Meshes) -> Transformer | None:
    """The model with the weights of all ranks, on rank 0; None on the others. Collective. One tensor is sent at a time, so only
    rank 0 needs memory: 4 bytes per parameter."""
    mine = {clean_name(name): x for part in parts for name, x in part.state_dict().items()}
    model, weights = meta_model(config), {}
    for name, shape in ((name, x.shape) for name, x in model.state_dict().items()):
        x = mine.get(name)
        if x is None:  # of another stage of the pipeline
            x = torch.zeros(shape, device=device_here())
        else:
            x = x.detach().to(device_here())  # from the CPU, if parameters are offloaded
            x = x.full_tensor() if isinstance(x, DTensor) else x
        if meshes.pipeline.size() > 1:
            x = x.clone()
            dist.all_reduce(x, group=meshes.pipeline.get_group())
        if dist.get_rank() == 0:
            weights[name] = x.clone()
    if not weights:
        return None
    model.load_state_dict(weights, assign=True)
    return model.eval()


def texts(model: Transformer, windows: list[list[int]], tokenizer: Tokenizer, seed: int) -> Iterator[str]:
    """Markdown of each window: its beginning, how the model goes on, and how the text does."""
    given = min(GIVEN, len(windows[0]) // 2)
    end = min(len(windows[0]), given + WRITTEN)
    options: Any = dict(sampling=SAMPLING, vocab_size=tokenizer.vocab_size, graph=False)
    for number, window in enumerate(windows, 1):
        steps = generate(model, [window[:given]], max_tokens=end - given, seed=seed + number, **options)
        parts = {"given": window[:given], "the model": [token for (token,) in steps], "the text": window[given:end]}
        for name, tokens in parts.items():
            lines = tokenizer.decode(tokens).splitlines() or [""]
            yield "\n".join([f"**Sample {number}, {name}**", "", *(f"    {line}" for line in lines), ""])


def samples(
    parts: list[Any],
    config: ModelConfig,
    meshes: Meshes,
    dataset: PackedDataset | MixtureDataset,
    tokenizer: Tokenizer,
    *,
    number: int,
    seed: int,
) -> tuple[str, Tensor | None] | None:
    """Texts of so many windows that lie evenly over a validation split, as Markdown, and an image of the maps of the first
    (None of mixers without maps). On rank 0; None on the others. Collective."""
    if (model := whole_model(parts, config, meshes)) is None:
        return None
    windows = [dataset[i * len(dataset) // number].tolist() for i in range(number)]
    text = "\n".join(texts(model, windows, tokenizer, seed))
    tokens = torch.tensor(windows[0][:MAPPED], device=device_here())
    layers = read_layers(model, tokens, list(range(config.n_layers)))
    return text, picture(layers) if any(layer.weights is not None for layer in layers.values()) else None
