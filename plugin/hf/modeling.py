"""The model as transformers runs it: `AutoModelForCausalLM.from_pretrained(folder)`, `.generate()`, Trainer.

A thin layer around `interdomain.model`, which computes everything.
"""

import contextlib
import copy
import functools
import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from interdomain.model.config import Execution
from interdomain.model.generation import prefill
from interdomain.model.state import ModelState
from interdomain.model.transformer import Transformer

from .cache import LEFT, InterdomainCache
from .checks import check_places, check_weights, sha256
from .configuration import InterdomainConfig

# Shapes: B batch, T tokens of this pass, V vocabulary.

LOSS_ARGUMENTS = {"num_items_in_batch", "shift_labels"}  # Trainer's, for the loss
CACHES = (None, "dynamic", "static")  # cache_implementation
AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")  # device_map
DTYPES = (None, "auto", torch.float32, torch.float64, torch.bfloat16, torch.float16)
QUANTIZED = ("quantization_config", "load_in_8bit", "load_in_4bit")


class InterdomainForCausalLM(PreTrainedModel, GenerationMixin):
    """Parameters are those of `interdomain.model.Transformer`, under the same names.

    Args:
        execution: how the mixers are computed (`interdomain.model.config.Execution`), by name: backend="chunkwise-torch".
    Attributes:
        transformer: the model itself, for `interdomain.model.generation`; its children are this module's.
    """

    config_class = InterdomainConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # transformers asks; attention is computed in one way, whichever is named
    gradient_checkpointing = False
    _is_stateful = True  # no assisted generation, which takes tokens back
    # Writes this code into a folder. Only the package has one: what a folder holds, transformers copies by itself.
    write_code = None

    def __init__(self, config: InterdomainConfig, **execution) -> None:
        config.check()
        super().__init__(config)
        model = Transformer(config.model, Execution(**execution))
        self._modules.update(model._modules)
        self._bind(model)
        self.post_init()
        # After post_init: transformers 4 refuses names of which a model has no parameter.
        self._keep_in_fp32_modules_strict = {"ssm", "frequencies"}

    def _bind(self, transformer: Transformer) -> None:
        # One dictionary of children for both, so that one that is replaced is replaced in both. Not a child itself: that would
        # give every parameter a second name.
        transformer.__dict__["_modules"] = self._modules
        self.__dict__["transformer"] = transformer

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()
        replica._bind(copy.copy(self.transformer))
        return replica

    def _apply(self, fn, recurse=True):  # to, cuda, half, ...
        LEFT.pop(self, None)
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value) -> None:
        if name == "hf_device_map":  # accelerate's, which has placed the model
            check_places(value)
        super().__setattr__(name, value)

    def _init_weights(self, module) -> None:
        """Nothing: a new model has its values, and one with missing tensors is refused."""

    def get_input_embeddings(self):
        return self.tok_embeddings

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        self.tok_embeddings = embeddings

    def get_output_embeddings(self):
        return self.output

    def set_output_embeddings(self, output: nn.Module) -> None:
        self.output = output

    @property
    def base_model(self) -> "InterdomainModel":
        return InterdomainModel(self)

    def get_decoder(self) -> "InterdomainModel":
        return self.base_model

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs):
        if new_num_tokens in (None, self.config.vocab_size):
            return self.tok_embeddings
        raise NotImplementedError(
            "the vocabulary of this model is fixed: spare rows, if it has any, are its last tokens."
        )

    # Files

    @classmethod
    def from_pretrained(cls, folder, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers; device_map="auto" chooses one device.

        Raises: FileNotFoundError, ValueError for weights that are altered, missing or of another model, on several devices, on
            disk, quantized or of a dtype that is not computed with.
        """
        quantized = [name for name in QUANTIZED if kwargs.get(name)]
        if quantized:
            raise ValueError(
                f"this model is not made to be quantized: leave out {quantized[0]}; dtype='bfloat16' halves it."
            )
        asked = kwargs.get("dtype", kwargs.get("torch_dtype"))
        if getattr(torch, str(asked).removeprefix("torch."), asked) not in DTYPES:
            raise ValueError(f"dtype is {asked}: this model is float32, float64, bfloat16 or float16.")
        places = kwargs.get("device_map")
        if isinstance(places, str) and places in AUTOMATIC:
            places = kwargs["device_map"] = "cuda" if torch.cuda.is_available() else "cpu"
        check_places(places if isinstance(places, dict) else {"": places})
        if os.path.isdir(folder):
            check_weights(Path(folder) / (kwargs.get("subfolder") or ""))
        model, found = super().from_pretrained(folder, *args, output_loading_info=True, **kwargs)
        wrong = [f"{what.partition('_')[0]} {sorted(map(str, names))[0]}" for what, names in found.items() if names]
        if wrong:
            raise ValueError(
                f"the weights of {folder} do not fit its config.json: {', '.join(wrong)}. Copy the folder again."
            )
        if model.dtype == torch.float64:
            model.double()  # the dynamics too, which no other dtype changes
        return (model, found) if output_loading_info else model

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs) -> None:
        """As in transformers, with the checksums of what was written; of an adapter, that alone.

        Raises: ValueError for push_to_hub=True.
        """
        if kwargs.get("push_to_hub"):
            raise ValueError(
                "push_to_hub=True would upload half of it: call model.push_to_hub(name), which saves first."
            )
        if not is_main_process or getattr(self, "_hf_peft_config_loaded", False):
            return super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        folder, variant = Path(save_directory), f".{kwargs['variant']}" if kwargs.get("variant") else ""
        # transformers removes shards of an earlier save, but neither their index nor a whole file, which it reads first.
        index = folder / f"model.safetensors.index{variant}.json"
        older = index.read_bytes() if index.is_file() else None
        index.unlink(missing_ok=True)
        try:
            super().save_pretrained(save_directory, **kwargs)
        except BaseException:
            if older is not None:
                index.write_bytes(older)
            raise
        if index.exists():
            (folder / f"model{variant}.safetensors").unlink(missing_ok=True)
        record = json.loads((folder / "config.json").read_text())
        if self.write_code is not None:
            record["auto_map"] = self.write_code(folder)
        record["weights"] = {file.name: sha256(file) for file in sorted(folder.glob("model*.safetensors"))}
        (folder / "config.json").write_text(json.dumps(record, indent=2) + "\n")
        # The project's own tokenizer file, which transformers does not know, from where this model was loaded; only if its
        # checksum is right, for a config.json from elsewhere could name any file.
        described = record.get("tokenizer") or {}
        file = Path(self.config.name_or_path) / Path(str(described.get("file"))).name
        if file.is_file() and not (folder / file.name).exists() and sha256(file) == described.get("sha256"):
            shutil.copyfile(file, folder / file.name)

    # Computing

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: InterdomainCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **loss_arguments,
    ):
        """transformers' arguments; input_ids [B, T] -> logits [B, T, V] and the state behind them.

        Args:
            attention_mask: [B, T] or [B, tokens read + T]: 0 for padding, on the left (without a cache also on the right).
            use_cache: None for True in evaluation, where there are no labels and no padding on the right.
            labels: [B, T]; padding and a text's first token, which follows nothing, are no part of the loss.
        Raises: ValueError for what has no meaning here: other masks, tokens outside the vocabulary, attention matrices.
        """
        unknown = [name for name, value in loss_arguments.items() if value is not None and name not in LOSS_ARGUMENTS]
        if unknown:
            raise ValueError(f"this model has no use for {', '.join(unknown)}; leave it out.")
        if input_ids is None:
            raise ValueError("input_ids are missing: this model reads tokens, nothing else.")
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions: this model has no attention matrices to return; leave it out.")
        every = self.gradient_checkpointing if self.training and torch.is_grad_enabled() else 0
        if every and (use_cache or past_key_values is not None):
            raise ValueError(
                "gradient checkpointing computes layers again, from no state: leave out use_cache and past_key_values."
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
            if use_cache and attention_mask is not None:  # a state would read padding after a text
                use_cache = bool(attention_mask[..., -1].all())
            use_cache = use_cache or past_key_values is not None
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        state = self._state(past_key_values, input_ids)
        seen = 0 if state is None else state.length
        if not torch.compiler.is_compiling() and not (seen and input_ids.shape[1] == 1):
            self._check_tokens(input_ids)
        padding = _padding(attention_mask, input_ids, state, use_cache or state is not None)
        last = logits_to_keep if isinstance(logits_to_keep, int) else None
        watched = output_hidden_states or torch.is_grad_enabled()  # by hooks, or by autograd
        step = seen and past_key_values.room is not None and input_ids.shape[1] == 1
        step = step and padding is None and last is not None and not watched
        if state is not None and not step:
            state = past_key_values.release()
        if state is None and (use_cache or padding is not None):
            state = self.transformer.init_state(len(input_ids), capacity=input_ids.shape[1])
        with _Recorder(self if output_hidden_states else None) as recorded, self._recomputed(every):
            if step:
                logits = past_key_values.step(self, input_ids[:, 0])[:, None]
                state = past_key_values.state
            elif state is not None and last == 1 and not watched:
                logits = prefill(self.transformer, input_ids, state, padding=padding)[0][:, None]
            else:
                whole = output_hidden_states or not last
                logits = self.transformer(input_ids, state, padding=padding, last=None if whole else last)
                logits = logits[:, logits_to_keep] if last is None else logits[:, -last:]
        loss = None
        if labels is not None:
            if padding is not None:  # what padding predicts: up to a text's first token
                behind = torch.arange(input_ids.shape[1], device=labels.device) <= padding[:, None].to(labels.device)
                labels = labels.masked_fill(behind, -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **loss_arguments)
        cache = None
        if use_cache:
            cache = InterdomainCache() if past_key_values is None else past_key_values
            cache.state = state
        output = CausalLMOutputWithPast(loss, logits, cache, recorded.states if output_hidden_states else None)
        return output.to_tuple() if return_dict is False else output

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func=checkpoint, every_n_layers: int = 1
    ) -> None:
        self.gradient_checkpointing = enable and every_n_layers
        # The reentrant kind, transformers 4's default, would lose the gradients of the dynamics.
        self._checkpoint = functools.partial(gradient_checkpointing_func, use_reentrant=False)

    @contextlib.contextmanager
    def _recomputed(self, every: int):
        """Of `every` so many layers one keeps its inputs alone, and is computed again for gradients; 0: none."""
        layers = list(self.layers.values())[::every] if every else []
        before = [layer.__dict__.get("forward") for layer in layers]  # somebody else's wrapper
        for layer in layers:
            layer.forward = functools.partial(self._checkpoint, functools.partial(_from_a_copy, layer.forward))
        try:
            yield
        finally:
            for layer, forward in zip(layers, before, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward

    def _state(self, cache: InterdomainCache | None, tokens: Tensor) -> ModelState | None:
        if cache is None:
            return None
        if not isinstance(cache, InterdomainCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; this model takes the InterdomainCache that it returned."
            )
        if cache.state is not None and len(cache.state.position) != len(tokens):
            raise ValueError(
                f"past_key_values holds {len(cache.state.position)} texts, input_ids {len(tokens)}: continue all of them."
            )
        return cache.state

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32) or not tokens.numel():
            raise ValueError(
                f"input_ids must be int64 or int32 [batch, tokens], one at least: got {tokens.dtype} of {list(tokens.shape)}."
            )
        lowest, highest, vocab = tokens.min().item(), tokens.max().item(), self.config.vocab_size
        if lowest < 0 or highest >= vocab:
            raise ValueError(
                f"input_ids holds the token {lowest if lowest < 0 else highest}, outside the vocabulary of 0 to {vocab - 1}. "
                "Use the folder's own tokenizer."
            )

    # Generation

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, mode, batch, max_cache_length) -> None:
        """The cache is made here: prefill_chunk_size asks for one, and "static" is known here alone."""
        if model_kwargs.get("position_ids") is not None:  # transformers 4 refuses them itself
            raise ValueError("this model has no use for position_ids; leave it out.")
        kind, cache = generation_config.cache_implementation, model_kwargs.get("past_key_values")
        if kind not in CACHES:
            raise ValueError(
                f"cache_implementation is {kind!r}: this model has a state of its own. Leave it out, or give 'static' for "
                "steps of fixed shape, which CUDA replays as a graph."
            )
        if cache is not None:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch, max_cache_length)
            if isinstance(cache, InterdomainCache) and cache.room is not None:
                cache.room = cache.get_seq_length() + max_cache_length  # that of the whole text, or of what is new
        elif generation_config.use_cache:
            model_kwargs["past_key_values"] = InterdomainCache(room=max_cache_length if kind == "static" else None)

    def init_continuous_batching(self, *args, **kwargs):
        raise NotImplementedError(
            "continuous batching ('paged') is for caches of keys and values: use generate on a batch."
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: InterdomainCache | None = None,
        attention_mask: Tensor | None = None,
        next_sequence_length: int | None = None,
        **kwargs,
    ) -> dict:
        """The tokens that the state has not read: transformers 5 counts them, or gives no others; in 4 the mask is as long as
        the text so far."""
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        new = next_sequence_length
        if new is None and seen and attention_mask is not None:
            new = attention_mask.shape[1] - seen
        if new is not None:
            if new < 1:
                raise ValueError(
                    f"past_key_values has read {seen} tokens, input_ids has {input_ids.shape[1]}: give the whole text, what "
                    "was read and at least one token more (or the new tokens with an attention_mask over the whole text)."
                )
            input_ids = input_ids[:, -new:]
        passed = ("use_cache", "logits_to_keep", "output_hidden_states", "output_attentions")
        return {
            "input_ids": input_ids.contiguous(),
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            **{name: kwargs[name] for name in passed if name in kwargs},
        }


class InterdomainModel(InterdomainForCausalLM):
    """A model without its head: what it returns is `last_hidden_state`, its parameters and settings are the model's own.

    Made for every use of `base_model` (TRL's trainers, which apply the head in pieces), so that what has been replaced is.
    """

    def __init__(self, model: InterdomainForCausalLM) -> None:
        nn.Module.__init__(self)
        own = {*vars(self), "forward"} - {"training"}  # forward's hooks and replacements are the whole model's
        vars(self).update({name: value for name, value in vars(model).items() if name not in own})
        self._modules.update({**model._modules, "output": nn.Identity()})
        self._bind(copy.copy(model.transformer))

    @property
    def base_model(self) -> "InterdomainModel":
        return self

    def forward(self, *args, return_dict: bool | None = None, **kwargs):
        whole = super().forward(*args, **kwargs)
        output = BaseModelOutputWithPast(whole.logits, whole.past_key_values, whole.hidden_states)
        return output.to_tuple() if return_dict is False else output


def _from_a_copy(forward, x: Tensor, rope, dynamics, state, packing) -> Tensor:
    """A layer that leaves its state, which is there for padding, as it was."""
    return forward(x, rope, dynamics, copy.copy(state), packing)


class _Recorder:
    """Collects what transformers calls hidden states: the input of every layer, and the output of the last norm."""

    def __init__(self, model: InterdomainForCausalLM | None) -> None:
        self.model, self.states, self.hooks = model, (), []

    def __enter__(self) -> "_Recorder":
        if self.model is not None:
            layers = self.model.layers.values()
            self.hooks = [layer.register_forward_pre_hook(lambda _, args: self._add(args[0])) for layer in layers]
            self.hooks.append(self.model.norm.register_forward_hook(lambda _, args, out: self._add(out)))
        return self

    def _add(self, x: Tensor) -> None:
        self.states += (x,)

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()


def _padding(mask: Tensor | None, tokens: Tensor, state: ModelState | None, cached: bool) -> Tensor | None:
    """How many of the first tokens of each row are padding, [B]; None if the mask leaves none out."""
    if mask is None:
        return None
    (B, T), seen = tokens.shape, 0 if state is None else state.length
    if mask.ndim != 2 or mask.shape[0] != B or mask.shape[1] not in (T, seen + T):
        raise ValueError(
            f"attention_mask is {list(mask.shape)}; expected {[B, T]}{f' or {[B, seen + T]}' if seen else ''}."
        )
    mask = mask[:, -T:].bool()
    if mask.all():
        return None
    begun = torch.zeros_like(mask) if state is None else (state.position > 0)[:, None]
    before = (mask.cumsum(1) == 0) & ~begun
    after = mask.flip(1).cumsum(1).flip(1) == 0
    if not (mask | before | after).all():
        raise ValueError(
            "attention_mask has zeros between tokens; only padding before the text can be left out. (Where none is given, "
            "transformers makes one of the pad tokens in input_ids: then give one.)"
        )
    if cached and (after & ~before).any():
        raise ValueError(
            "attention_mask has zeros after the text, which the state would read. Pad on the left (padding_side='left'), or "
            "leave out the state (use_cache=False)."
        )
    return before.sum(1) if before.any() else None
