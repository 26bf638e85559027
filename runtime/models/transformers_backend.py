"""Architectures that decoder.py does not cover: transformers' own modules over our paged attention, which is slower.

Our attention is registered with transformers' AttentionInterface. Models that cannot be served this way (recurrent
state, cross attention, special masks, ALiBi) are refused while loading. Code in a checkpoint is never run.
"""

import inspect
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.logging import disable_progress_bar

from llmserve.runtime.attention.base import AttentionBackend, AttentionSpec
from llmserve.runtime.config import ConfigError
from llmserve.runtime.layers.weight import PlainWeight, Slot, Slots, Staged
from llmserve.runtime.models.configs import ModelConfig, TensorInfo

_ATTENTION = "llmserve"
_IMMATERIAL = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "max_position_embeddings",
    "pad_token_id",
    "transformers_version",
    "use_cache",
}
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_NOT_PAGED = ("s_aux", "position_bias", "alibi")
"""Arguments of an attention function that change its scores in ways that paged backends do not support."""


class TransformersModel:
    """A CausalLM (registry.py) around a transformers model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self._model = _make_model(config, dtype, device)
        self._weights = {name: _ParameterWeight(tensor) for name, tensor in stored_tensors(self._model)}
        self._base = self._model.base_model
        self._step = _Step(config)
        for module in self._base.modules():
            if isinstance(getattr(module, "layer_idx", None), int):  # where the attention function finds it
                module.__dict__["llmserve_step"] = self._step
        # what follows the base model (scaling, softcap, head) runs unchanged, on our hidden states
        self._replay = _Replay()
        setattr(self._model, self._model.base_model_prefix, self._replay)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBackend, hidden: Tensor | None = None
    ) -> Tensor:
        """As CausalLM.forward; there is one pipeline stage."""
        self._step.begin(attention)
        output = self._base(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        self._step.end()
        last: Tensor = output.last_hidden_state[0]
        return last

    def logits(self, hidden: Tensor) -> Tensor:
        """As CausalLM.logits."""
        self._replay.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        try:
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        except AttributeError as error:  # the head uses attributes of the base model
            raise ConfigError(f"{self.config.architecture} cannot be served: {error}") from error
        return logits.float()

    def slots(self) -> Slots:
        for name, weight in self._weights.items():
            yield name, Slot(weight, weight.shape)


class TransformersSource:
    """The tensors of a checkpoint (engine/checkpoint.py) under the names that transformers' modules give them.

    Some architectures merge tensors while loading, so transformers loads the whole checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"transformers cannot load {directory}: {error}") from error
        model, report = loaded
        wrong = [f"{name}: {kind.removesuffix('_keys')}" for kind, names in report.items() for name in sorted(names)]
        if wrong:
            raise ConfigError(f"{directory} does not fit the model: {'; '.join(wrong[:5])}")
        self._values = {name: tensor.detach() for name, tensor in stored_tensors(model)}
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), str(tensor.dtype), tensor.nbytes)
            for name, tensor in self._values.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._values[name]


def _make_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    hf_config = _hf_config(config)
    try:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    except KeyError as error:
        raise ConfigError(f"transformers has no language model of type {config.model_type!r}") from error
    kinds = set(getattr(hf_config.get_text_config(), "layer_types", None) or ())
    if not kinds <= _LAYER_TYPES:
        names = ", ".join(sorted(kinds - _LAYER_TYPES))
        raise ConfigError(f"{config.architecture} has layers of the kind {names}, which cannot be served")
    if not model_class.is_backend_compatible():
        raise ConfigError(f"{config.architecture} does not use transformers' attention interface: it cannot be served")
    make: Any = AutoModelForCausalLM.from_config
    try:
        with no_init_weights(), torch.device(device):
            model: PreTrainedModel = make(hf_config, dtype=dtype, attn_implementation=_ATTENTION)
        model.tie_weights()
    except Exception as error:  # a bad config may make any of a hundred architectures raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"transformers cannot make {config.architecture}: {reason}") from error
    model.train(False)
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise ConfigError(f"{config.architecture} does not take positions, so it cannot be served")
    return model


def _hf_config(config: ModelConfig) -> PreTrainedConfig:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_bytes(config.raw)
        try:
            read: PreTrainedConfig = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            return read
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(f"transformers cannot read a config of type {config.model_type!r}: {reason}") from error


def config_differences(current: ModelConfig, new: ModelConfig) -> list[str]:
    """The differences between two configs with defaults filled in, a line each, except in what does not affect the
    computation.
    """
    old_values, new_values = (_hf_config(config).to_dict() for config in (current, new))
    return [
        f"config: {name} is {new_values.get(name)}, the model has {old_values.get(name)}"
        for name in sorted(old_values.keys() | new_values.keys())
        if name not in _IMMATERIAL and old_values.get(name) != new_values.get(name)
    ]


def stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, tied ones once."""
    saved = model.state_dict().keys()
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


class _ParameterWeight(PlainWeight):
    """A weight whose value is a tensor that the module already has."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tuple(tensor.shape), tensor.dtype, tensor.device)
        self.value = tensor.detach()

    def _first(self, values: Staged) -> None:
        assert isinstance(values, Tensor)
        self.value.copy_(values)


class _Step:
    """The attention backend of the current forward pass, and the layers that have called it."""

    attention: AttentionBackend

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.called: list[int] = []

    def begin(self, attention: AttentionBackend) -> None:
        self.attention = attention
        self.called.clear()

    def end(self) -> None:
        """Raises ConfigError unless each layer has attended exactly once: others have a state that would be wrong
        here.
        """
        if sorted(self.called) != list(range(self.config.num_layers)):
            raise ConfigError(f"{self.config.architecture} has layers that are no plain attention: it cannot be served")


class _Replayed(BaseModelOutputWithPast):
    """Hidden states as the output of a base model; all other attributes are None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Replay(nn.Module):
    """Replaces the base model while the head runs: returns the hidden states that it was given."""

    hidden: Tensor

    def forward(self, *args: object, **kwargs: object) -> BaseModelOutputWithPast:
        return _Replayed(last_hidden_state=self.hidden)


def _paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, Hq, T, D], key and value [1, Hkv, T, D] to [1, T, Hq, D].

    Raises ConfigError for attention that paged backends do not support, at the latest in the warm-up.
    """
    step: _Step = module.llmserve_step
    config = step.config
    other = attention_mask is not None or any(kwargs.get(name) is not None for name in _NOT_PAGED)
    if other or not getattr(module, "is_causal", True):
        raise ConfigError(f"{config.architecture} attends in a way that cannot be served")
    for part in (key, value):
        if (part.shape[1], part.shape[3]) != (config.num_kv_heads, config.head_dim):
            found, expected = f"{part.shape[1]} x {part.shape[3]}", f"{config.num_kv_heads} x {config.head_dim}"
            raise ConfigError(f"{config.architecture} has KV heads of {found}, not {expected}: it cannot be served")
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else _window(module)
    spec = AttentionSpec(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap)
    step.called.append(module.layer_idx)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    output = step.attention.forward(module.layer_idx, q, k, v, spec)
    return output.view(1, *q.shape), None


def _window(module: Any) -> int | None:
    """The sliding window of a layer whose module does not pass it, because transformers' mask would imply it."""
    types = getattr(module.config, "layer_types", None)
    if types is None:
        slides = hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask")
    else:
        slides = types[module.layer_idx] == "sliding_attention"
    window: int | None = getattr(module.config, "sliding_window", None)
    return window if slides else None


AttentionInterface.register(_ATTENTION, _paged_attention)
disable_progress_bar()  # type: ignore[no-untyped-call]  # a log line a file is enough, and standard error is the log
