"""The state of a text as transformers passes it on, and the captured steps that one text leaves to the next."""

import weakref

import torch
from torch import Tensor

from interdomain.model.generation import Decoder
from interdomain.model.state import ModelState

# Shapes: B batch, V vocabulary.

# Per model the Decoder of the last text that ended: capturing its graph took as long as hundreds of steps. It knows the
# `Transformer`, which does not know the model: both go when the model goes.
LEFT: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _keep(model: weakref.ref, decoder: Decoder) -> None:
    if (alive := model()) is not None:
        LEFT[alive] = decoder


class InterdomainCache:
    """`past_key_values`: a model's state, made at the first pass and advanced in place.

    It cannot go back: to continue one text in several ways, copy it (`copy.deepcopy`) before. `state` lives no longer than it.

    Args:
        room: tokens in all, to decode in steps of fixed shape: on CUDA one CUDA graph (`Decoder`). None: plain steps.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, state: ModelState | None = None, room: int | None = None) -> None:
        self.state, self.room, self.decoder = state, room, None

    def step(self, model, tokens: Tensor) -> Tensor:
        """One token of each row, [B] -> logits [B, V], by an `InterdomainForCausalLM`."""
        if self.decoder is None:
            self.decoder = self._decoder(model, self.room - self.state.length)
            self.state = self.decoder.state
            if self.decoder.restarts:
                self._given_back = weakref.finalize(self, _keep, weakref.ref(model), self.decoder)
                self._given_back.atexit = False
        return self.decoder.step(tokens).clone()

    def _decoder(self, model, room: int) -> Decoder:
        """The one that an earlier text has left, or a new one."""
        left = LEFT.pop(model, None)  # nobody else has it from now on
        if left is not None and left.fits(self.state, room):
            left.restart(self.state, room)
            return left
        del left  # its memory, before there is another
        return Decoder(model.transformer, self.state, room=room)

    def release(self) -> ModelState | None:
        """The state, which is to be advanced otherwise than by `step`."""
        if self.decoder is not None:
            if self.decoder.restarts:  # its tensors stay the graph's
                self.state = self.state.clone()
                self._given_back()
            self.decoder = self.state.cursor = None
        return self.state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read, left padding included."""
        return 0 if self.state is None else self.state.length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1  # no limit

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.decoder is None:
            self.state = self.state.select(beam_idx)
        else:  # its graph knows the tensors' addresses
            self.state.take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = self.release().select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(len(self.state.position), device=self.state.position.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        self.release()
        self.state = None

    def crop(self, *args) -> None:
        raise NotImplementedError(
            "a recurrent state cannot forget its last tokens: copy the cache before it reads them."
        )

    def __reduce__(self) -> tuple:
        """Copied and pickled without the steps, which know the model."""
        return InterdomainCache, (None if self.state is None else self.state.clone(), self.room)

    def __deepcopy__(self, memo) -> "InterdomainCache":
        made, arguments = self.__reduce__()
        return made(*arguments)
