"""A transformers model whose decoder layers have no weights until one is asked for.

The model is built on the meta device. Embeddings, final norm and head are loaded once; a decoder
layer is filled just before it runs and emptied right after, so that memory does not grow with the
number of layers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from mxfp4.calibration.streaming.weights import Weights
from mxfp4.errors import MissingExtraError, TensorNotFoundError, UnsupportedFormatError

EXTRA = "calibrate"
_IMPLEMENTATIONS = {"attn_implementation": "sdpa"}


@dataclass(frozen=True)
class ModelOptions:
    """How model code is found and in which dtype it computes."""

    trust_remote_code: bool = False
    """Run Python files of the checkpoint folder; never without being asked."""
    dtype: torch.dtype = torch.float32


class Skeleton:
    """The model of a checkpoint folder without weights in its decoder layers.

    `layers` are the decoder layers, `prefix` the name of their container. Raises
    `MissingExtraError` without transformers and `UnsupportedFormatError` for an architecture that
    transformers does not know or whose layers cannot be told.
    """

    def __init__(self, folder: Path, weights: Weights, options: ModelOptions) -> None:
        self.options = options
        self.model = build(folder, options)
        self.config: Any = self.model.config.get_text_config()
        self.prefix, self.layers = find_layers(self.model, int(self.config.num_hidden_layers))
        inside = {name for name, _ in self.model.named_parameters() if self._in_layers(name)}
        self._outside = [n for n, _ in self.model.named_parameters() if n not in inside]
        self._fill_outside(weights)
        self._calls: dict[tuple[int, int], list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}

    @property
    def width(self) -> int:
        """Channels of the hidden states, H."""
        return int(self.config.hidden_size)

    @property
    def head_size(self) -> int | None:
        """Channels of one attention head, or None where the config does not tell."""
        found = getattr(self.config, "head_dim", None)
        heads = getattr(self.config, "num_attention_heads", None)
        return int(found) if found else self.width // int(heads) if heads else None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The input of the first decoder layer for `tokens` int64 [S, T]: [S, T, H]."""
        hidden, _ = self._walk(tokens)
        return hidden

    def run(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """The output of a filled decoder layer for hidden states [S, T, H]."""
        batch, length = hidden.shape[:2]
        if (batch, length) not in self._calls:
            _, calls = self._walk(torch.zeros(batch, length, dtype=torch.int64))
            self._calls[batch, length] = calls
        arguments, keywords = self._calls[batch, length][number]
        with torch.no_grad():
            output = self.layers[number](hidden, *arguments, **keywords)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits float32 [..., V] of hidden states behind the last layer."""
        norm = self._final_norm()
        head = self.model.get_output_embeddings()
        with torch.no_grad():
            logits: torch.Tensor = head(hidden if norm is None else norm(hidden))
        return logits.float()

    @contextmanager
    def filled(self, number: int, weights: Weights) -> Iterator[nn.Module]:
        """The decoder layer with its weights, for as long as the context lasts."""
        layer = self.layers[number]
        for name, parameter in list(layer.named_parameters()):
            full = f"{self.prefix}.{number}.{name}"
            place(layer, name, weights.parameter(full, parameter.shape, self.options.dtype))
        for name, buffer in list(layer.named_buffers()):
            full = f"{self.prefix}.{number}.{name}"
            if weights.holds(full):
                place(layer, name, weights.parameter(full, buffer.shape, buffer.dtype))
        self._make_buffers(layer)
        try:
            yield layer
        finally:
            layer.to_empty(device="meta")

    def _in_layers(self, name: str) -> bool:
        return name.startswith(self.prefix + ".")

    def _fill_outside(self, weights: Weights) -> None:
        for name in self._outside:
            wanted = self.model.get_parameter(name)
            if not weights.holds(name) and name == self._head_name():
                continue
            place(self.model, name, weights.parameter(name, wanted.shape, self.options.dtype))
        self.model.tie_weights()
        head = self.model.get_output_embeddings()
        if head is None or head.weight.is_meta:
            raise TensorNotFoundError(
                "the checkpoint holds no head, and the config does not tie it to the embedding",
                tensor=self._head_name(),
            )
        for name, module in self.model.named_modules():
            if not self._in_layers(name + "."):
                self._make_buffers(module, recurse=False)

    def _head_name(self) -> str:
        head = self.model.get_output_embeddings()
        names = [name for name, module in self.model.named_modules() if module is head]
        return f"{names[0]}.weight" if names else "lm_head.weight"

    def _make_buffers(self, module: nn.Module, *, recurse: bool = True) -> None:
        """Give buffers that no checkpoint stores, such as rotary frequencies, their values."""
        for part in module.modules() if recurse else [module]:
            if any(buffer.is_meta for buffer in part._buffers.values() if buffer is not None):
                for name, buffer in part._buffers.items():
                    if buffer is not None and buffer.is_meta:
                        part._buffers[name] = torch.empty_like(buffer, device="cpu")
                self.model._init_weights(part)

    def _final_norm(self) -> nn.Module | None:
        parent = self.model.get_submodule(self.prefix.rpartition(".")[0])
        for name in ("norm", "final_layernorm", "ln_f", "norm_f"):
            if isinstance(found := getattr(parent, name, None), nn.Module):
                return found
        return None

    def _walk(
        self, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        """Run the model with layers that only note their arguments."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        first: list[torch.Tensor] = []

        def note(hidden: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
            if not first:
                first.append(hidden)
            calls.append((arguments, keywords))
            return hidden

        inner = self.model.get_submodule(self.prefix.rpartition(".")[0])
        for layer in self.layers:
            layer.forward = note
        try:
            with torch.no_grad():
                inner(input_ids=tokens, use_cache=False)
        finally:
            for layer in self.layers:
                del layer.forward
        return first[0], calls


def build(folder: Path, options: ModelOptions) -> Any:
    """The model on the meta device, in evaluation mode."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtraError("transformers", EXTRA) from error
    try:
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=options.trust_remote_code
        )
        for key in ("quantization_config", "compression_config"):
            if hasattr(config, key):
                delattr(config, key)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            create: Any = AutoModelForCausalLM.from_config
            model = create(
                config,
                dtype=options.dtype,
                trust_remote_code=options.trust_remote_code,
                **_IMPLEMENTATIONS,
            )
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedFormatError(
            f"transformers cannot build this model ({error})",
            file=str(folder),
            hint="--trust-remote-code runs model code from the checkpoint folder, if you trust it",
        ) from error
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


def find_layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """The outermost list of `count` decoder layers, and its name."""
    for name, module in model.named_modules():
        fits = isinstance(module, nn.ModuleList) and len(module) == count
        if fits and re.search(r"(layers|blocks|h)$", name):
            return name, cast(nn.ModuleList, module)
    raise UnsupportedFormatError(
        f"no list of {count} decoder layers was found in {type(model).__name__}",
        hint="only decoder models built from one list of layers can be run block by block",
    )


def place(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a tensor in place of a parameter or buffer."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value
