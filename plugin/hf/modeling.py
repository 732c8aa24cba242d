"""The model as transformers runs it: `AutoModelForCausalLM.from_pretrained(folder)`, `.generate()`, Trainer.

A thin layer around `interdomain.model`, which computes everything.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from interdomain.model.config import Execution
from interdomain.model.generation import prefill
from interdomain.model.state import ModelState
from interdomain.model.transformer import Transformer

from .configuration import InterdomainConfig

# Shapes: B batch, T tokens of this pass, V vocabulary.

LOSS_ARGUMENTS = {"num_items_in_batch", "shift_labels"}  # Trainer's, for the loss


class InterdomainCache:
    """`past_key_values`: a model's state, made at the first pass and advanced in place.

    It cannot go back: to continue one text in several ways, copy it (`copy.deepcopy`) before.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, state: ModelState | None = None) -> None:
        self.state = state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read, left padding included."""
        return 0 if self.state is None else self.state.length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1  # no limit

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state = self.state.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(len(self.state.position), device=self.state.position.device)
        self.state = self.state.select(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        self.state = None

    def crop(self, *args) -> None:
        raise NotImplementedError(
            "a recurrent state cannot forget its last tokens: copy the cache before it reads them."
        )

    def __deepcopy__(self, memo) -> "InterdomainCache":
        return InterdomainCache(None if self.state is None else self.state.clone())


class InterdomainForCausalLM(PreTrainedModel, GenerationMixin):
    """Parameters are those of `interdomain.model.Transformer`, under the same names.

    Args:
        execution: how the mixers are computed (`interdomain.model.config.Execution`), by name: backend="chunkwise-torch".
    Attributes:
        transformer: the model itself, for `interdomain.model.generation`; its children are this module's.
    """

    config_class = InterdomainConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    _is_stateful = True  # no assisted generation, which takes tokens back
    # Writes this code into a folder. Only the package has one: what a folder holds, transformers copies by itself.
    write_code = None

    def __init__(self, config: InterdomainConfig, **execution) -> None:
        super().__init__(config)
        model = Transformer(config.model, Execution(**execution))
        self._modules.update(model._modules)
        # One dictionary of children for both, so that one that is replaced is replaced in both. Not a child itself: that would
        # give every parameter a second name.
        model.__dict__["_modules"] = self._modules
        self.__dict__["transformer"] = model
        if not self.output.weight.is_meta:  # a new model: from_pretrained builds on the meta device
            model.init_weights(torch.initial_seed())
        self.post_init()
        # After post_init: transformers 4 refuses names of which a model has no parameter.
        self._keep_in_fp32_modules_strict = {"ssm", "frequencies"}

    def _init_weights(self, module) -> None:
        """Nothing: a new model has its values, and one with missing tensors is refused."""

    def get_input_embeddings(self):
        return self.tok_embeddings

    def get_output_embeddings(self):
        return self.output

    def resize_token_embeddings(self, *args, **kwargs):
        raise NotImplementedError(
            "the vocabulary of this model is fixed: spare rows, if it has any, are its last tokens."
        )

    # Files

    @classmethod
    def from_pretrained(cls, folder, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers.

        Raises: FileNotFoundError, ValueError for weights that are altered, missing or of another model, or on several devices.
        """
        if os.path.isdir(folder):
            _check_weights(Path(folder) / (kwargs.get("subfolder") or ""))
        model, found = super().from_pretrained(folder, *args, output_loading_info=True, **kwargs)
        wrong = [f"{what.partition('_')[0]} {sorted(map(str, names))[0]}" for what, names in found.items() if names]
        if wrong:
            raise ValueError(
                f"the weights of {folder} do not fit its config.json: {', '.join(wrong)}. Copy the folder again."
            )
        places = sorted(set(map(str, (getattr(model, "hf_device_map", None) or {}).values())))
        if len(places) > 1:
            raise ValueError(
                f"this model runs on one device, device_map spreads it over {', '.join(places)}: name one."
            )
        return (model, found) if output_loading_info else model

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs) -> None:
        """As in transformers, with the checksums of what was written."""
        self.config.weights = None
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if not is_main_process:
            return
        folder = Path(save_directory)
        record = json.loads((folder / "config.json").read_text())
        if self.write_code is not None:
            record["auto_map"] = self.write_code(folder)
        record["weights"] = {file.name: _sha256(file) for file in sorted(folder.glob("*.safetensors"))}
        (folder / "config.json").write_text(json.dumps(record, indent=2) + "\n")

    # Computing

    def forward(
        self,
        input_ids: Tensor,
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
        Raises: ValueError for what has no meaning here: other masks, tokens outside the vocabulary, attention matrices.
        """
        unknown = [name for name, value in loss_arguments.items() if value is not None and name not in LOSS_ARGUMENTS]
        if unknown:
            raise ValueError(f"this model has no use for {', '.join(unknown)}; leave it out.")
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions: this model has no attention matrices to return; leave it out.")
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training and labels is None)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        state = self._state(past_key_values, input_ids)
        seen = 0 if state is None else state.length
        if not torch.compiler.is_compiling() and not (seen and input_ids.shape[1] == 1):
            self._check_tokens(input_ids)
        padding = _padding(attention_mask, input_ids, state, use_cache or state is not None)
        if state is None and (use_cache or padding is not None):
            state = self.transformer.init_state(len(input_ids), capacity=input_ids.shape[1])
        last = logits_to_keep if isinstance(logits_to_keep, int) else 0
        with _Recorder(self if output_hidden_states else None) as recorded:
            if state is not None and last == 1 and not output_hidden_states and not torch.is_grad_enabled():
                logits = prefill(self.transformer, input_ids, state, padding=padding)[0][:, None]
            else:
                whole = output_hidden_states or not last
                logits = self.transformer(input_ids, state, padding=padding, last=None if whole else last)
                logits = logits[:, -last:] if isinstance(logits_to_keep, int) else logits[:, logits_to_keep]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **loss_arguments)
        cache = None
        if use_cache:
            cache = InterdomainCache() if past_key_values is None else past_key_values
            cache.state = state
        output = CausalLMOutputWithPast(loss, logits, cache, recorded.states if output_hidden_states else None)
        return output.to_tuple() if return_dict is False else output

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
        if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
            raise ValueError(f"input_ids must be integers [batch, tokens], one at least: got {list(tokens.shape)}.")
        lowest, highest, vocab = tokens.min().item(), tokens.max().item(), self.tok_embeddings.num_embeddings
        if lowest < 0 or highest >= vocab:
            raise ValueError(
                f"input_ids holds the token {lowest if lowest < 0 else highest}, outside the vocabulary of 0 to {vocab - 1}. "
                "Use the folder's own tokenizer."
            )

    # Generation

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = InterdomainCache()  # prefill_chunk_size asks for one

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


def _check_weights(folder: Path) -> None:
    """Raises FileNotFoundError, ValueError unless the files of weights are those that config.json names."""
    config = folder / "config.json"
    weights = json.loads(config.read_text()).get("weights") if config.is_file() else None
    for name, wanted in (weights or {}).items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{folder} lacks {name}; copy the whole folder again.")
        if _sha256(file) != wanted:
            raise ValueError(f"{file} is not the file that was exported (its checksum differs). Copy the folder again.")


def _sha256(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
