"""What is captured: a causal LM as a function of flattened tokens, with what was asked for besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphsrt.errors import CompileError, explain


class FlatModel(nn.Module):
    """``(tokens [T], positions [T]) -> logits [T, V], hidden states [T, E]…``; a reference model is flat already.

    hidden: which hidden states, by their index in transformers' ``output_hidden_states``, which finds them.
    takes_embeds: two more inputs: the output of the model's input embedding is replaced by ``input_embeds [T, E]`` in
        the rows where ``is_embeds [T, 1]`` is true. That is what transformers' ``inputs_embeds`` replaces as well, so
        whatever a model does to its embeddings afterwards (Gemma-2 scales them) is done to these too.
    """

    def __init__(self, net: nn.Module, hidden: Sequence[int] = (), takes_embeds: bool = False):
        from transformers import PreTrainedModel

        super().__init__()
        self.net = net
        self.hidden = hidden
        self.is_flat_already = not isinstance(net, PreTrainedModel)
        if self.is_flat_already and (hidden or takes_embeds):
            raise CompileError(
                explain(
                    "hidden states and input embeddings are taken from models of transformers only",
                    where=type(net).__name__,
                    hint="compile this model without capture_hidden and input_embeds",
                )
            )
        self.takes_embeds = takes_embeds

    @property
    def embedding(self) -> nn.Module:
        """What turns tokens into embeddings."""
        return self.net.get_input_embeddings()  # type: ignore[operator]

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        input_embeds: torch.Tensor | None = None,
        is_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if self.is_flat_already:
            return (self.net(tokens, positions),)
        if is_embeds is None or input_embeds is None:
            return self._run(tokens, positions)

        def replaced(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return torch.where(is_embeds[None], input_embeds[None], output)

        hook = self.embedding.register_forward_hook(replaced)
        try:
            return self._run(tokens, positions)
        finally:
            hook.remove()

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        asked = {"output_hidden_states": True} if self.hidden else {}
        result = self.net(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, return_dict=True, **asked
        )
        if not self.hidden:
            return (result.logits[0],)
        states = result.hidden_states
        if states is None or len(states) <= max(self.hidden):
            raise CompileError(
                explain(
                    f"{type(self.net).__name__} does not give the hidden states that capture_hidden asks for",
                    expected=f"output_hidden_states up to index {max(self.hidden)}",
                    got="none" if states is None else f"{len(states)} of them",
                )
            )
        return (result.logits[0], *(states[index][0] for index in self.hidden))
