"""Interdomain Attention in transformers.

The model is a Llama-style decoder whose token mixer reads a recurrent state of fixed size.

Shapes: B batch, T tokens.
"""

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

from .cache_interdomain import InterdomainCache, Rows, ssm_tensors_of, token_order
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

logger = logging.get_logger(__name__)
NO_PACKED_SEQUENCES = "no packed sequences"  # in errors
# transformers' name of a cache, in arguments and outputs: `cache` since 5.24. The model takes both.
CACHE_NAME = (
    "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
)
# By this table Trainer's label smoothing knows that labels are shifted.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["interdomain"] = "InterdomainForCausalLM"
# The value of initializer_range that `initial_value` draws linear layers and embeddings for: it is
# their standard deviation, and sqrt(2 n_layers) times that of the output projections wo and w2.
INITIAL_STD = 0.02


class InterdomainDecoderLayer(GradientCheckpointingLayer):
    """A mixer of the package and a feed-forward layer.

    Args:
        config: The configuration of a model all of whose layers are like this one.
        hidden: Width of the feed-forward layer.
        layer_idx: The layer's place in the model, by which the cache knows its state.
    """

    def __init__(self, config: ModelConfig, hidden: int, layer_idx: int) -> None:
        # The class has the arguments.
        super().__init__()
        self.layer_idx = layer_idx
        self.attention = mixer_class(config.mixer)(config)
        self.feed_forward = FeedForward(config.dim, hidden)
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)

    def forward(
        self, hidden: Tensor, rope: Any, rows: Rows, past_key_values: InterdomainCache | None = None
    ) -> Tensor:
        """Computes x = hidden + mixer(norm(hidden)), then x + feed_forward(norm(x)).

        Args:
            hidden: Hidden states, [B, T, dim]; the result has their shape.
            rope: The cosines and sines of the tokens in the order of `rows`; None if no layer
                rotates.
            rows: The padding of the batch: how the tokens of each row are ordered for the mixer and
                back (`order`, `inverse`), what it must mask (`packing`), and which keys and values
                the cache keeps (`kept_slots`).
            past_key_values: The cache, which has the state of every layer and is advanced. None:
                each row begins without a state, and none is kept.
        """
        x = self.attention_norm(hidden)
        # A recurrence reads each row's tokens first and its padding last. Softmax has no `order`.
        if rows.order is not None:
            x = take(x, rows.order)

        # The mixer reads its state and the tables of its SSM parameters. With a cache both come
        # from it, and the state that the mixer has advanced goes back.
        if past_key_values is None:
            ssm_tensors = ssm_tensors_of(self.attention, x)
            y = self.attention(x, rope, ssm_tensors, None, rows.packing)
        else:
            state, ssm_tensors = past_key_values.state_of(self.layer_idx, self.attention, x)
            y = self.attention(x, rope, ssm_tensors, state, rows.packing)
            past_key_values.keep_state(self.layer_idx, state, rows.kept_slots)

        # Back to the order of the batch, then the residual sum and the feed-forward layer.
        if rows.inverse is not None:
            y = take(y, rows.inverse)
        hidden = hidden + y
        return hidden + self.feed_forward(self.ffn_norm(hidden))


class InterdomainPreTrainedModel(PreTrainedModel):
    """Base of the classes below: initial values, data types, and transformers' properties."""

    config_class = InterdomainConfig
    base_model_prefix = "model"
    _input_embed_layer = "tok_embeddings"
    supports_gradient_checkpointing = True
    _no_split_modules = ["InterdomainDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    # The head's matrix, in a model without a head.
    _keys_to_ignore_on_load_unexpected = [r"^output\.weight$"]  # noqa: RUF012
    # No assisted generation, which takes tokens back.
    _is_stateful = True

    def post_init(self) -> None:
        """Draws initial values, and names the modules that stay float32 in any model.

        The constructors of the classes below call it at their end, when all modules are there.
        """
        # Note each module's name in the package's model as its attribute `path`: `_init_weights`
        # draws by this name. It is set through `vars`, because type checkers allow only modules and
        # tensors as attributes of a module.
        modules = dict(self.named_modules())
        for name, module in modules.items():
            vars(module)["path"] = name.removeprefix("model.")
        super().post_init()
        # Two modules of a mixer stay float32: `ssm`, the parameters of its recurrence, and
        # `feature_map`, the random frequencies of the features. The attribute names them only now,
        # because transformers 4 would refuse feature_map, which has buffers only, in its own
        # post_init. It also refuses modules that a model lacks, so only those that are there are
        # named.
        last_names = {name.rpartition(".")[2] for name in modules}
        self._keep_in_fp32_modules_strict = {"ssm", "feature_map"} & last_names

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Returns False: transformers must not make a cache of its own kind."""
        return False

    def float32_modules(self) -> list[nn.Module]:
        """Returns the modules whose tensors must not be rounded to fewer than 32 bits.

        They hold the SSM parameters. With FSDP2, call `fully_shard` on them first, before the
        layers, and without a `param_dtype`.
        """
        # This calls the package's function of the same name, which takes any model.
        return float32_modules(self)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draws the package's initial values for a module's tensors, unless they were loaded.

        transformers calls this for every module.

        Args:
            module: A module of the model. Only tensors of its own are drawn, not those of its
                children.
        """
        # The values follow from the tensor's name in the package's model, from the configuration in
        # the package's form, and from a seed. First the module's part of the name, which post_init
        # has set. A module that was added later has none.
        path = getattr(module, "path", "")
        is_matrix = isinstance(module, nn.Linear | nn.Embedding)
        if is_matrix and not path.startswith("layers."):
            # Embeddings and heads start alike, also those that are added later.
            path = "output"
        package_config = self.config.to_model_config()
        # The seed follows PyTorch's random state.
        seed = int(torch.randint(2**62, (), device="cpu"))

        tensors = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
        for name, tensor in tensors:
            # transformers marks the tensors that it has loaded.
            if getattr(tensor, "_is_hf_initialized", False):
                continue
            value = initial_value(f"{path}.{name}", tensor.shape, package_config, seed)
            # `initial_value` draws matrices as for initializer_range = INITIAL_STD.
            if is_matrix:
                value = value * (self.config.initializer_range / INITIAL_STD)
            tensor.copy_(value)


class InterdomainModel(InterdomainPreTrainedModel):
    """The decoder without a head: tokens to the output of the last norm.

    Attributes:
        package_config: The configuration as the package's `ModelConfig`.
        windows: For each layer None if it is a recurrence, else the window of its softmax
            attention; 0 for no window. Layers with the same window need to know the same about the
            rows of a batch.
        has_rope: True if some layer rotates queries and keys.
    """

    def __init__(self, config: InterdomainConfig) -> None:
        super().__init__(config)
        # The configuration in the package's form, a ModelConfig. Each entry of its `layers` is
        # again a ModelConfig, of a model whose layers are all like this one.
        self.package_config = config.to_model_config()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        # The window of each softmax layer, 0 if it has none, and None for a recurrence.
        self.windows: list[int | None] = []
        for layer_idx, layer_config in enumerate(self.package_config.layers):
            layer = InterdomainDecoderLayer(layer_config, config.intermediate_size, layer_idx)
            self.layers.append(layer)
            window = None
            if layer_config.mixer.kind == "softmax":
                window = layer_config.mixer.window or 0
            self.windows.append(window)
        self.has_rope = any(layer.mixer.rope for layer in self.package_config.layers)
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
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Computes the output of the last norm, with the arguments of transformers' decoders.

        Args:
            input_ids: Tokens [B, T], or None with inputs_embeds.
            attention_mask: [B, T], or with a cache [B, tokens read + T], 0 for padding. Padding may
                stand before, after or between the tokens of a row, also in a turn that continues a
                cache, and leaves no trace.
            position_ids: Accepted if they count a row's tokens, with or without padding. The model
                counts by itself.
            past_key_values: The cache, which the pass advances.
            inputs_embeds: Embeddings [B, T, dim] in place of input_ids.
            use_cache: Returns the cache, a new one if none is given. None for the configuration's
                value in evaluation. In training, None means that value if a cache is given, else
                False.
            output_hidden_states: Returns the inputs of all layers and the output of the last norm
                as well. None for the configuration's value.
            output_attentions: True is an error: there are no attention matrices.
            cache: Another name of past_key_values.
            kwargs: Ignored, apart from arguments for packed sequences, which are refused.

        Returns:
            transformers' output: the hidden states [B, T, dim]; the cache if use_cache is true; and
            the hidden states of all layers if output_hidden_states is.

        Raises:
            ValueError: For both or neither of input_ids and inputs_embeds, other position_ids,
                packed sequences, attention matrices, a mask of another shape or with other padding
                than the cache has read, another model's cache or one of another number of rows, and
                under gradient checkpointing a cache that has read something.
            NotImplementedError: Under torch.jit.trace.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two.")
        if output_attentions:
            raise ValueError(
                "output_attentions: this model has no attention matrices to return; leave it out."
            )
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
            if kwargs.get(name) is not None:
                raise ValueError(f"{NO_PACKED_SEQUENCES}: give each text a row.")
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            raise NotImplementedError(
                "torch.jit.trace would make constants of length and mask: use torch.export."
            )

        # Choose the cache. It has two names, because transformers 5.24 has renamed it.
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and (cache is not None or not self.training)
        if getattr(self, "_is_replica", False):
            use_cache = False  # nn.DataParallel cannot join the caches of its replicas
        if self.gradient_checkpointing and self.training:
            # The layers' passes are computed again in the backward pass, so they must not advance a
            # cache. An empty one is left out.
            if getattr(cache, "length", 0):
                raise ValueError(
                    "past_key_values: gradient checkpointing reads its tokens again; leave one of the two out."
                )
            use_cache = False
            cache = None
        if not isinstance(cache, InterdomainCache | None):
            raise ValueError(
                f"past_key_values must be an InterdomainCache: got {type(cache).__name__}."
            )
        if use_cache and cache is None:
            cache = InterdomainCache()

        # Embed the tokens, and prepare what layers need to know of the batch: RoPE's tables and the
        # padding (`Rows`), by a layer's window; None for a recurrence. `position` is the number of
        # tokens of each row after this pass.
        hidden: Tensor = self.tok_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        prepared, position = self._prepare(hidden, attention_mask, position_ids, cache)

        # Pass them through the layers, which advance their states in the cache. `windows` is longer
        # than `layers` if a user has removed the last layers.
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden_states = ()
        for window, layer in zip(self.windows, self.layers, strict=False):
            # Only if they are returned: otherwise their memory is free after the layer.
            if output_hidden_states:
                hidden_states += (hidden,)
            rope, rows = prepared[window]
            hidden = layer(hidden, rope, rows, past_key_values=cache)
        hidden = self.norm(hidden)

        # The cache has now read these tokens, too.
        if cache is not None:
            cache.position = position
            cache.length = cache.length + hidden.shape[1]
        return BaseModelOutputWithPast(
            hidden,  # pyright: ignore[reportArgumentType]
            cache if use_cache else None,
            (*hidden_states, hidden) if output_hidden_states else None,
        )

    def _prepare(
        self,
        embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: InterdomainCache | None,
    ) -> tuple[dict[int | None, tuple[Any, Rows]], Tensor]:
        """Prepares what the layers need to know of a batch, once for all layers of the same window.

        It also notes in the cache the mask of a pass with padding, and for softmax layers, with or
        without a window, which token is in each slot.

        Args:
            embeds: The embeddings [B, T, dim] of the tokens.
            attention_mask: [B, T] or [B, tokens read + T], 0 for padding; None for no padding.
            position_ids: The positions that the user gave, which are only checked; or None.
            cache: The cache that the pass advances, or None.

        Returns:
            prepared: (rope, rows) by the layers' window, which is None for recurrences and 0 for
                softmax without one. `rope` has RoPE's cosines and sines, or is None; `rows` is the
                `Rows`: where padding stands and how layers move it.
            position: The number of tokens of each row after this pass, [B].

        Raises:
            ValueError: The cache holds another number of rows, or mask or positions do not fit.
        """
        B, T, _ = embeds.shape
        device = embeds.device
        before = 0 if cache is None else cache.length

        # The number of tokens that each row has read so far, without padding.
        start = torch.zeros(B, dtype=torch.int64, device=device)
        if cache is not None and cache.position is not None:
            if cache.position.shape[0] != B:  # not len(), a constant in an exported graph
                raise ValueError(
                    f"past_key_values holds {len(cache.position)} texts, this batch {B}: continue all."
                )
            start = cache.position.to(device)

        # The mask of the new tokens, [B, T]; None without padding.
        mask = None
        if attention_mask is not None:
            mask = self._mask_of_new_tokens(attention_mask, B, T, cache).to(device)
            # A graph that is traced cannot depend on the mask's values, so it always computes with
            # the mask; but a single token, a step of `generate`, is never padding.
            if torch.compiler.is_compiling():
                is_without_padding = T == 1
            else:
                is_without_padding = bool(mask.all())
            if is_without_padding:
                mask = None
            elif cache is not None and not is_exporting():
                cache.masks.append((before, mask))

        # The number of each token in its row, without padding, [B, T]. `counted` is for the order
        # of the batch, in which padding may stand between the tokens. `ordered` is for that of
        # recurrent layers, which move padding behind the tokens (`Rows.padded`).
        is_token = torch.ones(B, T, dtype=torch.bool, device=device) if mask is None else mask
        counted = start[:, None] + is_token.long().cumsum(1) - 1
        if position_ids is not None and not is_exporting():
            # A compiled graph breaks here, because values decide.
            check_position_ids(position_ids, is_token, start, before)
        # Padding before the first token would have -1.
        counted = counted.clamp_min(0)
        ordered = start[:, None] + torch.arange(T, device=device)

        # Layers of the same window share their tables and rows. `dict.fromkeys` takes each window
        # once.
        prepared = {}
        for window in dict.fromkeys(self.windows):
            positions = counted
            rows = Rows()
            # Softmax masks padding; a recurrence moves it to the end.
            if window is not None:
                rows = Rows.attended(window, counted, mask, cache, embeds.dtype)
            elif mask is not None:
                positions = ordered
                rows = Rows.padded(mask)
            rope = rope_of(self.package_config, positions, embeds.dtype) if self.has_rope else None
            prepared[window] = rope, rows
        return prepared, start + is_token.sum(1)

    def _mask_of_new_tokens(
        self, attention_mask: Tensor, B: int, T: int, cache: InterdomainCache | None
    ) -> Tensor:
        """Checks the user's mask, and returns that of the new tokens, [B, T], False for padding.

        Args:
            attention_mask: The mask that the user gave, 0 for padding: of the new tokens, [B, T],
                or of the cache's tokens, too, [B, cache.length + T].
            B: The number of rows of the batch.
            T: The number of new tokens.
            cache: The cache of the tokens before, or None.

        Raises:
            ValueError: The mask has another shape, or other padding than the cache has read. Under
                torch.compile the cache's padding is not compared. Under torch.export neither is
                compared, only that the mask has two dimensions.
        """
        # The shape. An exported graph does not know how many tokens its cache has read.
        before = 0 if cache is None else cache.length
        fits = is_exporting() or attention_mask.shape in ((B, T), (B, before + T))
        if attention_mask.ndim != 2 or not fits:
            raise ValueError(
                f"attention_mask is {list(attention_mask.shape)}; expected {[B, T]} or {[B, before + T]}."
            )

        # The columns of the cache's tokens, if the mask has them: the state has read these tokens,
        # and it would be wrong if the mask now calls one of them padding, or the other way round. A
        # graph that is traced cannot depend on the mask's values.
        has_earlier_tokens = attention_mask.shape[1] > T and not torch.compiler.is_compiling()
        if has_earlier_tokens and cache is not None and not cache.has_read(attention_mask):
            raise ValueError(
                "attention_mask and past_key_values disagree about the tokens before these: a state cannot take tokens "
                "back that it has read as text. Leave past_key_values out, and give the whole text; `generate` does so."
            )
        return attention_mask[:, -T:].bool()


def check_position_ids(position_ids: Tensor, mask: Tensor, start: Tensor, before: int) -> None:
    """Checks that position_ids count the tokens of each row, with or without its padding.

    Args:
        position_ids: The positions that the user gave, [T], [1, T] or [B, T].
        mask: [B, T], False for padding.
        start: The number of tokens that each row has in the cache, without padding, [B].
        before: The number of tokens in the cache, padding included.

    Raises:
        ValueError: They count something else.
    """
    B, T = mask.shape
    ids = position_ids.to(mask.device)
    fits = ids.shape in ((T,), (1, T), (B, T))
    # Two ways to count are allowed. Without padding, [B, T]; positions of padding may then be
    # anything, so only those of tokens are compared (`[mask]`).
    without_padding = start[:, None] + mask.long().cumsum(1) - 1
    # With padding, [T].
    with_padding = torch.arange(T, device=mask.device) + before
    if not fits or ((ids != without_padding)[mask].any() and (ids != with_padding).any()):
        raise ValueError(
            f"position_ids, {list(position_ids.shape)}, must count the {T} tokens of each row: leave them out "
            f"({NO_PACKED_SEQUENCES})."
        )


class InterdomainForCausalLM(InterdomainPreTrainedModel, GenerationMixin):
    """The decoder with a head that predicts the next token."""

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
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """Resizes the embedding and the head, as transformers does.

        With pad_to_multiple_of they get more rows than there are tokens. `generate` must not choose
        the rows that are no tokens, so their ids go into generation_config.suppress_tokens.

        Args:
            new_num_tokens: The number of tokens of the new vocabulary; None for no change.
            args, kwargs: transformers' other arguments, such as pad_to_multiple_of.
        """
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        if new_num_tokens is not None and self.generation_config is not None:
            # transformers has set config.vocab_size to the number of rows.
            rows_without_token = [*range(new_num_tokens, self.config.vocab_size)]
            self.generation_config.suppress_tokens = rows_without_token or None
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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Computes logits [B, T, vocabulary], and the loss if there are labels.

        `InterdomainModel.forward` says more about the arguments that it has, too.

        Args:
            input_ids: Tokens [B, T], or None with inputs_embeds.
            attention_mask: [B, T], or with a cache [B, tokens read + T], 0 for padding; None for no
                padding.
            position_ids: Accepted if they count a row's tokens. The model counts by itself.
            past_key_values: The cache, which the pass advances; or None.
            inputs_embeds: Embeddings [B, T, dim] in place of input_ids.
            use_cache: True to return a cache, False for none. None: as the configuration has it,
                but none in training unless a cache is given.
            cache: Another name of past_key_values.
            labels: [B, T], -100 where nothing is predicted. Padding and a row's first token, which
                follows nothing, are never predicted.
            logits_to_keep: The number of last positions for which logits are computed, 0 for all;
                or these positions. With 1 it is each row's last token, which padding may follow.
            kwargs: Further arguments of `InterdomainModel.forward`, and those of transformers'
                loss.
        """
        cache = past_key_values if cache is None else cache
        outputs = self.model(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, **kwargs
        )
        hidden = outputs.last_hidden_state
        T = hidden.shape[1]

        # Compute the logits of the positions that are asked for.
        kept = logits_to_keep
        if isinstance(logits_to_keep, int):
            kept = slice(-logits_to_keep, None)  # all of them for 0
            # The last token of each row may have padding behind it. Take its hidden state:
            # [B, T, dim] -> [B, 1, dim].
            if logits_to_keep == 1 and attention_mask is not None:
                mask = attention_mask[:, -T:].to(hidden.device).bool()
                # In this order tokens come first, so that the last one is at its row's length - 1.
                # A row without tokens has -1 there, and takes the last position.
                order, _, lengths = token_order(mask)
                last = (lengths[:, None] - 1) % T
                hidden = take(hidden, order.gather(1, last))
        logits = self.output(hidden[:, kept])

        loss = None
        if labels is not None:
            if attention_mask is not None:
                # Predict no padding, and nothing after padding: only tokens that follow a token.
                # -100 is transformers' label for no prediction.
                mask = attention_mask[:, -T:].to(labels.device).bool()
                follows_token = F.pad(mask, (1, 0))[:, :-1]
                kept_labels = labels.masked_fill(~(mask & follows_token), -100)
                items = kwargs.get("num_items_in_batch")
                if items is not None:
                    # Trainer divides the loss by this number, which it counts without the mask.
                    # Reduce it to the share of labels that are left. A row's first label is never
                    # predicted.
                    given = (labels[:, 1:] != -100).sum()
                    left = (kept_labels[:, 1:] != -100).sum()
                    kwargs["num_items_in_batch"] = items * left / given.clamp_min(1)
                labels = kept_labels
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss, logits, outputs.get(CACHE_NAME), outputs.hidden_states)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the arguments of the next pass of `generate`, which calls this before each pass.

        transformers makes them; this method checks for new tokens, and leaves position_ids out.

        Args:
            input_ids: All tokens so far, [B, tokens].
            inputs_embeds: Embeddings of the prompt, in place of its tokens.
            kwargs: transformers' other arguments, such as the cache, under the name CACHE_NAME
                (past_key_values, or cache since transformers 5.24).

        Raises:
            ValueError: The cache has read all tokens, and no token is new.
        """
        # The number of tokens that the cache has not read, or None if transformers does not say.
        # transformers 4 gives their positions instead.
        new = kwargs.get("next_sequence_length")
        if new is None and "cache_position" in kwargs:
            new = len(kwargs["cache_position"])
        if new is not None and new < 1 and kwargs.get(CACHE_NAME) is not None:
            raise ValueError(
                "input_ids must have at least one token more than past_key_values has read."
            )
        prepared = super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        # Leave out transformers' positions. With padding on the right it counts them otherwise than
        # the model, which counts by itself.
        prepared.pop("position_ids", None)
        return prepared

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: this model has no pages of keys and values.

        Args:
            args, kwargs: transformers' settings of continuous batching. They are ignored.
        """
        raise NotImplementedError(
            "transformers' continuous batching keeps pages of keys and values, which this model's "
            "cache does not have: call generate with a padded batch."
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        """Prepares the cache. transformers' `generate` calls this before its first pass.

        Without a cache of the user, this makes a new one. If the user's cache has read its tokens
        with other padding than the mask has, it is emptied in place, with a warning, and `generate`
        reads the whole text.

        Args:
            generation_config: transformers' GenerationConfig.
            model_kwargs: The arguments of the model's passes, with the user's cache if there is
                one; the new cache is put among them. Its name is CACHE_NAME: past_key_values, or
                cache since transformers 5.24.
            args: transformers' other arguments.

        Raises:
            ValueError: Another kind of cache is asked for.
        """
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation is {kind!r}, and this model has its own: leave it out."
            )

        # Empty the user's cache if it has read as text what is padding in the mask, such as the
        # padding behind the answer of a row that ended early. No token can be taken back.
        # `generate` gives the model what comes after the cache's tokens, so that an empty cache
        # reads the whole text again.
        cache = model_kwargs.get(CACHE_NAME)
        mask = model_kwargs.get("attention_mask")
        if isinstance(cache, InterdomainCache) and mask is not None and not cache.has_read(mask):
            logger.warning_once(
                "attention_mask and past_key_values disagree: the whole text is read again."
            )
            cache.reset()

        # transformers makes no cache for this model (`_supports_default_dynamic_cache`); it checks
        # the arguments.
        super()._prepare_cache_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            generation_config, model_kwargs, *args
        )
        if generation_config.use_cache and model_kwargs.get(CACHE_NAME) is None:
            model_kwargs[CACHE_NAME] = InterdomainCache()


class InterdomainForSequenceClassification(
    GenericForSequenceClassification, InterdomainPreTrainedModel
):
    """The decoder with a linear head on each row's last token.

    As in transformers' own classes, that is the last one that is not config.pad_token_id.
    """

    def __init__(self, config: InterdomainConfig) -> None:
        # The __init__ of transformers' GenericForSequenceClassification is left out: it would make
        # the decoder by AutoModel, which does not know the classes of an exported model.
        InterdomainPreTrainedModel.__init__(self, config)
        # config.num_labels is None if there are no labels. The head then has no outputs.
        self.num_labels = int(config.num_labels or 0)
        self.model = InterdomainModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()
