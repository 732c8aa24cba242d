"""Interdomain Attention in transformers: a Llama-style decoder whose token mixer reads a recurrent state of fixed size."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .cache_interdomain import InterdomainCache, Rows, dynamics_of, token_order
from .configuration_interdomain import InterdomainConfig
from .plain_interdomain import (
    FeedForward,
    ModelConfig,
    RMSNorm,
    float32_modules,
    initial_value,
    is_exporting,
    mixer_class,
    rope_of,
    take,
)

# Shapes: B batch, T tokens.

logger = logging.get_logger(__name__)
PACKED = "no packed sequences"
# transformers' name of a cache, in arguments and outputs: `cache` since 5.24. Both are taken here.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["interdomain"] = (
    "InterdomainForCausalLM"  # so Trainer's label smoothing shifts them
)
INITIAL_STD = 0.02  # of linear layers, in `initial_value`


class InterdomainDecoderLayer(GradientCheckpointingLayer):
    """A mixer of the package and a feed-forward."""

    def __init__(self, config: ModelConfig, hidden: int, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.attention = mixer_class(config.mixer)(config)
        self.feed_forward = FeedForward(config.dim, hidden)
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)

    def forward(
        self, hidden: Tensor, rope: Any, rows: Rows, past_key_values: InterdomainCache | None = None
    ) -> Tensor:
        """[B, T, dim] -> [B, T, dim]; a cache is advanced. rope: cos and sin of the tokens in the rows' order."""
        cache, x = past_key_values, self.attention_norm(hidden)
        if rows.order is not None:
            x = take(x, rows.order)
        if cache is None:
            y = self.attention(x, rope, dynamics_of(self.attention, x), None, rows.told)
        else:
            state, dynamics = cache.state_of(self.layer_idx, self.attention, x)
            y = self.attention(x, rope, dynamics, state, rows.told)
            cache.take_over(self.layer_idx, state, rows.stay)
        if rows.back is not None:
            y = take(y, rows.back)
        hidden = hidden + y
        return hidden + self.feed_forward(self.ffn_norm(hidden))


class InterdomainPreTrainedModel(PreTrainedModel):
    config_class = InterdomainConfig
    base_model_prefix = "model"
    _input_embed_layer = "tok_embeddings"
    supports_gradient_checkpointing = True
    _no_split_modules = ["InterdomainDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _keys_to_ignore_on_load_unexpected = [r"^output\.weight$"]  # noqa: RUF012 (the head, where only the rest is loaded)
    _is_stateful = True  # no assisted generation, which takes tokens back

    def post_init(self) -> None:
        modules = dict(self.named_modules())
        for name, module in modules.items():
            vars(module)["place"] = name.removeprefix("model.")  # for _init_weights
        super().post_init()
        self._keep_in_fp32_modules_strict = {"ssm", "feature_map"} & {
            name.rpartition(".")[2] for name in modules
        }

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def float32_modules(self) -> list[nn.Module]:
        """The modules that FSDP2 is to shard first, without a `param_dtype`: their parameters must not be rounded."""
        return float32_modules(self)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The package's initial values."""
        place, linear = getattr(module, "place", ""), isinstance(module, nn.Linear | nn.Embedding)
        if linear and not place.startswith(
            "layers."
        ):  # embeddings and heads, also those that are added
            place = "output"
        seed = int(torch.randint(2**62, (), device="cpu"))
        tensors = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
        for name, tensor in tensors:
            if getattr(tensor, "_is_hf_initialized", False):  # transformers' mark of a loaded one
                continue
            value = initial_value(f"{place}.{name}", tensor.shape, self.config.checked(), seed)
            tensor.copy_(value * (self.config.initializer_range / INITIAL_STD) if linear else value)


class InterdomainModel(InterdomainPreTrainedModel):
    """Tokens to the output of the last norm, without a head."""

    def __init__(self, config: InterdomainConfig) -> None:
        super().__init__(config)
        self.own = config.checked()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            InterdomainDecoderLayer(layer, config.intermediate_size, i)
            for i, layer in enumerate(self.own.layers)
        )
        # What a layer needs to know of the texts: None for a recurrence, else softmax's window, 0 where it has none.
        mixers = [layer.mixer for layer in self.own.layers]
        self.kinds = [(mixer.window or 0) if mixer.kind == "softmax" else None for mixer in mixers]
        self.rotated = any(mixer.rope for mixer in mixers)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: InterdomainCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cache: InterdomainCache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """The forward pass of transformers' decoders.

        Args:
            attention_mask: [B, T] or [B, tokens read + T], 0 for padding: before, after or between the tokens of a row, also in
                a turn that continues a cache. Padding leaves no trace.
            position_ids: accepted where they count a row's tokens, with padding or without; the model counts by itself.
            use_cache: None for the configuration's in evaluation; in training for that if a cache is given, else False.
        Raises: ValueError for other position_ids, packed sequences, a mask of another shape, another model's cache, one that
            has read something under gradient checkpointing, and attention matrices.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two.")
        if output_attentions:
            raise ValueError(
                "output_attentions: this model has no attention matrices to return; leave it out."
            )
        if any(
            kwargs.get(name) is not None for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
        ):
            raise ValueError(f"{PACKED}: give each text a row.")
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            raise NotImplementedError(
                "torch.jit.trace would make constants of length and mask: use torch.export."
            )
        hidden: Tensor = self.tok_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and (cache is not None or not self.training)
        if self.gradient_checkpointing and self.training:
            if getattr(cache, "length", 0):
                raise ValueError(
                    "past_key_values: gradient checkpointing reads its tokens again; leave one of the two out."
                )
            use_cache, cache = False, None
        if not isinstance(cache, InterdomainCache | None):
            raise ValueError(
                f"past_key_values must be an InterdomainCache: got {type(cache).__name__}."
            )
        cache = InterdomainCache() if use_cache and cache is None else cache
        prepared, seen = self._prepare(hidden, attention_mask, position_ids, cache)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        recorded = ()
        for kind, layer in zip(self.kinds, self.layers, strict=False):
            recorded += (hidden,)
            hidden = layer(hidden, *prepared[kind], past_key_values=cache)
        hidden = self.norm(hidden)
        if cache is not None:
            cache.position, cache.length = seen, cache.length + hidden.shape[1]
        states = (*recorded, hidden) if output_hidden_states else None
        return BaseModelOutputWithPast(hidden, cache if use_cache else None, states)  # pyright: ignore[reportArgumentType]

    def _prepare(
        self, embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache
    ):
        """({kind: (RoPE's cos and sin, Rows)}, tokens of each row after this pass [B])."""
        (B, T, _), device = embeds.shape, embeds.device
        start = torch.zeros(B, dtype=torch.int64, device=device)
        if cache is not None and cache.position is not None:
            if cache.position.shape[0] != B:  # not len(), a constant in an exported graph
                raise ValueError(
                    f"past_key_values holds {len(cache.position)} texts, this batch {B}: continue all."
                )
            start = cache.position.to(device)
        mask = None
        if attention_mask is not None:
            before = 0 if cache is None else cache.length
            fits = is_exporting() or attention_mask.shape in ((B, T), (B, before + T))
            if attention_mask.ndim != 2 or not fits:
                expected = f"{[B, T]} or {[B, before + T]}"
                raise ValueError(
                    f"attention_mask is {list(attention_mask.shape)}; expected {expected}."
                )
            # Values decide nothing where a graph is traced.
            whole = attention_mask.shape[1] > T and not torch.compiler.is_compiling()
            if whole and cache is not None and not cache.has_read(attention_mask):
                raise ValueError(
                    "attention_mask and past_key_values disagree about the tokens before these: a state cannot take tokens "
                    "back that it has read as text. Leave past_key_values out, and give the whole text; `generate` does so."
                )
            mask = attention_mask[:, -T:].to(device=device, dtype=torch.bool)
            if (
                T == 1 if torch.compiler.is_compiling() else mask.all()
            ):  # values decide nothing where a graph is traced
                mask = None
            if mask is not None and cache is not None and not is_exporting():
                cache.masks.append((cache.length, mask))
        ones = torch.ones(B, T, dtype=torch.bool, device=device) if mask is None else mask
        counted = start[:, None] + ones.long().cumsum(1) - 1
        if (
            position_ids is not None and not is_exporting()
        ):  # a compiled graph breaks here, for values decide
            check_position_ids(position_ids, ones, start, 0 if cache is None else cache.length)
        counted, ordered, prepared = (
            counted.clamp_min(0),
            start[:, None] + torch.arange(T, device=device),
            {},
        )
        for kind in dict.fromkeys(self.kinds):
            positions, rows = counted, Rows()
            if kind is not None:
                rows = Rows.attended(kind, counted, mask, cache, embeds.dtype)
            elif mask is not None:
                positions, rows = ordered, Rows.padded(mask)
            prepared[kind] = (
                rope_of(self.own, positions, embeds.dtype) if self.rotated else None,
                rows,
            )
        return prepared, start + ones.sum(1)


def check_position_ids(position_ids: Tensor, mask: Tensor, start: Tensor, seen: int) -> None:
    """Raises ValueError for positions that count neither the tokens of the mask [B, T] nor all its places.

    start: tokens of each row before these, [B]. seen: tokens before these, padding included.
    """
    (B, T), ids = mask.shape, position_ids.to(mask.device)
    counted = start[:, None] + mask.long().cumsum(1) - 1
    places = torch.arange(T, device=mask.device) + seen
    fits = ids.shape in ((T,), (1, T), (B, T))
    if not fits or ((ids != counted)[mask].any() and (ids != places).any()):
        raise ValueError(
            f"position_ids, {list(position_ids.shape)}, must count the {T} tokens of each row: leave them out ({PACKED})."
        )


class InterdomainForCausalLM(InterdomainPreTrainedModel, GenerationMixin):
    def __init__(self, config: InterdomainConfig) -> None:
        super().__init__(config)
        self.model = InterdomainModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.output = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args, **kwargs
    ) -> nn.Module:
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        if (
            new_num_tokens is not None and self.generation_config is not None
        ):  # rows from here on are no tokens
            self.generation_config.suppress_tokens = [
                *range(new_num_tokens, self.config.vocab_size)
            ] or None
        return embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: InterdomainCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: InterdomainCache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """The arguments of `InterdomainModel`, and:

        labels: [B, T], -100 where nothing is predicted. Padding and a row's first token, which follows nothing, never are.
        logits_to_keep: the last so many positions, or these positions; 0 for all. 1: each row's last token, which padding may
            follow.
        """
        cache = past_key_values if cache is None else cache
        outputs = self.model(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, **kwargs
        )
        hidden = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if isinstance(logits_to_keep, int) and logits_to_keep == 1 and attention_mask is not None:
            order, _, lengths = token_order(
                attention_mask[:, -hidden.shape[1] :].to(hidden.device).bool()
            )
            last = (lengths[:, None] - 1) % hidden.shape[1]
            hidden = take(hidden, order.gather(1, last))
        logits = self.output(hidden[:, kept])
        loss = None
        if labels is not None:
            if attention_mask is not None:
                mask = attention_mask[:, -hidden.shape[1] :].to(labels.device).bool()
                kept_labels = labels.masked_fill(~(mask & F.pad(mask, (1, 0))[:, :-1]), -100)
                if (
                    items := kwargs.get("num_items_in_batch")
                ) is not None:  # Trainer counts without the mask
                    there, left = ((x[:, 1:] != -100).sum() for x in (labels, kept_labels))
                    kwargs["num_items_in_batch"] = items * left / there.clamp_min(1)
                labels = kept_labels
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss, logits, outputs.get(CACHE), outputs.hidden_states)

    def prepare_inputs_for_generation(
        self, input_ids, inputs_embeds=None, **kwargs
    ) -> dict[str, Any]:
        new = kwargs.get("next_sequence_length")  # transformers 5
        nothing = new < 1 if new is not None else len(kwargs.get("cache_position", "-")) == 0
        if kwargs.get(CACHE) is not None and nothing:
            raise ValueError(
                "input_ids must have at least one token more than past_key_values has read."
            )
        prepared = super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        # The model counts by itself. transformers' count is another one where the padding is on the right.
        prepared.pop("position_ids", None)
        return prepared

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        super()._validate_model_kwargs(model_kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        # A pass does not see these (`prepare_inputs_for_generation`).
        ids = model_kwargs.get("position_ids")
        if ids is not None and model_kwargs.get(CACHE) is None:
            mask = model_kwargs.get("attention_mask")
            mask = torch.ones_like(ids) if mask is None else mask
            check_position_ids(ids, mask.bool(), mask.new_zeros(len(mask)), 0)

    def init_continuous_batching(self, *args, **kwargs):
        raise NotImplementedError(
            "transformers' continuous batching keeps pages of keys and values, and this model has a state of fixed size: call "
            "generate with a padded batch."
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args) -> None:
        if (name := generation_config.cache_implementation) not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation is {name!r}, and this model has its own: leave it out."
            )
        cache, mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
        # Rows that ended early, say, have padding behind their answer, which was read as text.
        if isinstance(cache, InterdomainCache) and mask is not None and not cache.has_read(mask):
            logger.warning_once(
                "attention_mask and past_key_values disagree: the whole text is read again."
            )
            cache.reset()
        super()._prepare_cache_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            generation_config, model_kwargs, *args
        )
        if generation_config.use_cache and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = InterdomainCache()


class InterdomainForSequenceClassification(
    GenericForSequenceClassification, InterdomainPreTrainedModel
):
    """A linear head on each row's last token that is not config.pad_token_id, as transformers computes it."""

    def __init__(self, config: InterdomainConfig) -> None:
        # Not transformers' own: AutoModel does not know a class that stands in a folder.
        InterdomainPreTrainedModel.__init__(self, config)
        self.num_labels = int(config.num_labels or 0)
        self.model = InterdomainModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()
