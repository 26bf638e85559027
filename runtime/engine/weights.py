"""Weights from a checkpoint into a model: at the start, and as a swap of a running model's.

Nothing may be missing and nothing left over. A swap is `preflight`, `stage_weights` (while the model serves),
`commit_weights` (in place, while no step runs), and then `discard_weights`; or `commit_weights` once more, which brings
the old weights back.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from llmserve.runtime.config import ConfigError
from llmserve.runtime.distributed.groups import Topology
from llmserve.runtime.engine.checkpoint import Source, open_source
from llmserve.runtime.engine.shared_source import SharedSource
from llmserve.runtime.engine.tensor_names import model_name, split_name
from llmserve.runtime.layers.weight import LinearWeight, Slot, Weight
from llmserve.runtime.models.configs import ModelConfig, TensorInfo
from llmserve.runtime.models.gguf import GgufTensor
from llmserve.runtime.models.hub import Checkpoint, tokenizer_digest
from llmserve.runtime.models.registry import CausalLM, build_model
from llmserve.runtime.ops import BLOCK_FORMATS, Blocks

Progress = Callable[[int, int], None]
"""Called with (done, total) in bytes of the checkpoint."""


class SwapCancelled(Exception):
    """The caller of stage_weights has cancelled it."""


class _Step(NamedTuple):
    """One tensor of the checkpoint and the slots that its rows fill, in order; none if it is of another stage."""

    name: str
    info: TensorInfo
    dtype: torch.dtype
    formats: dict[int, int]
    """The block formats (GGML's numbers) of all tensors of the same weight, by the first row that each fills; 0 for one
    that cannot stay in blocks.
    """
    slots: list[Slot]

    @property
    def in_blocks(self) -> bool:
        """Whether the weight stays in the file's blocks: all of it, or nothing."""
        weight = self.slots[0].weight
        if not isinstance(weight, LinearWeight) or 0 in self.formats.values():
            return False
        return not self.mixed or weight.takes_parts(self.formats)

    @property
    def mixed(self) -> bool:
        """Whether the tensors of the weight differ in format."""
        return len(set(self.formats.values())) > 1


def load_weights(model: CausalLM, checkpoint: Checkpoint, progress: Progress, topology: Topology | None = None) -> None:
    """Loads a checkpoint into a new model. Raises ConfigError, naming the differences, unless it has exactly the
    model's tensors.

    With several ranks all of them must call it: rank 0 reads and broadcasts.
    """
    source: Source
    if topology is not None and topology.joined:
        reads = topology.weights.rank == 0
        opened, device = open_source(checkpoint) if reads else None, weights_of(model)[0].device
        source = SharedSource(opened, topology.weights, device, topology.pp.size)
    else:
        source = open_source(checkpoint)
    steps, differences = _plan(model, source)
    if differences:
        raise ConfigError(_summary(checkpoint, differences))
    waiting = Counter(id(slot.weight) for step in steps for slot in step.slots)
    for slot in _load(source, steps, progress):
        waiting[id(slot.weight)] -= 1
        if not waiting[id(slot.weight)]:
            slot.weight.commit()
    if isinstance(source, SharedSource):
        source.end(True)


def weights_of(model: CausalLM) -> list[Weight]:
    """Each weight once, in the order of the model."""
    return list({id(slot.weight): slot.weight for _, slot in model.slots()}.values())


def weight_bytes(model: CausalLM) -> int:
    """Bytes of memory that the model's weights take on this rank."""
    return sum(weight.nbytes for weight in weights_of(model))


def preflight(model: CausalLM, current: Checkpoint, new: Checkpoint) -> list[str]:
    """What keeps `new` from replacing `current` in the running model, a line each; empty when nothing does.

    Reads headers only. Raises ConfigError when `new` cannot be read at all.
    """
    differences = _config_differences(current.config, new.config)
    if tokenizer_digest(current) != tokenizer_digest(new):
        differences.append("the tokenizer is another one")
    return differences + _plan(model, open_source(new))[1]


def stage_weights(
    model: CausalLM,
    checkpoint: Checkpoint,
    progress: Progress,
    cancelled: Callable[[], bool] = lambda: False,
    source: Source | None = None,
) -> int:
    """Reads and checks the weights of `checkpoint` beside the ones that serve; returns the bytes read.

    `source` is `checkpoint` where it is open already. Raises ConfigError (differences, a damaged file, values that are
    not finite) or SwapCancelled: nothing is staged.
    """
    source = source or open_source(checkpoint)
    steps, differences = _plan(model, source)
    if differences:
        raise ConfigError(_summary(checkpoint, differences))
    check = not (isinstance(source, SharedSource) and source.receives)  # one rank checks for all
    try:
        for _ in _load(source, steps, progress, check):
            if cancelled():
                raise SwapCancelled
    except BaseException:
        discard_weights(model)
        raise
    return sum(step.info.nbytes for step in steps)


def commit_weights(model: CausalLM) -> None:
    """Exchanges the staged weights with the ones that serve. No step may run meanwhile. A second call undoes it.

    If it raises, nothing was exchanged.
    """
    exchanged: list[Weight] = []
    try:
        for weight in weights_of(model):
            weight.commit()
            exchanged.append(weight)
    except BaseException:
        for weight in exchanged:
            weight.commit()
        raise


def discard_weights(model: CausalLM) -> None:
    """Frees what is staged: an abandoned new version, or the old one after a commit."""
    for weight in weights_of(model):
        weight.discard()


def _load(source: Source, steps: list[_Step], progress: Progress, check: bool = False) -> Iterator[Slot]:
    """Stages tensor after tensor and yields each slot that has been filled."""
    done, total = 0, sum(step.info.nbytes for step in steps)
    for step in steps:
        if isinstance(source, SharedSource) and source.receives and not step.slots:
            source.skip(step.name)
        else:
            _fill(source, step, check)
        yield from step.slots
        done += step.info.nbytes
        progress(done, total)


def _fill(source: Source, step: _Step, check: bool) -> None:
    """Reads one tensor and stages it in its slots. It is freed on return, so that at most one tensor is in memory, and
    none while a weight is packed.
    """
    values: Tensor | Blocks = source.read(step.name, torch.uint8 if step.info.blocks else step.dtype)
    if step.info.blocks:
        assert isinstance(values, Tensor)
        values = Blocks(values, BLOCK_FORMATS[step.info.blocks])
    if check and not (values.finite() if isinstance(values, Blocks) else bool(torch.isfinite(values).all())):
        raise ConfigError(f"tensor {step.name!r} has values that are not finite")
    if isinstance(values, Tensor) and step.slots and values.ndim > len(step.slots[0].shape):
        values = values.flatten(0, 1)
    parts = values.split([slot.shape[0] for slot in step.slots]) if len(step.slots) > 1 else (values,)
    for slot, part in zip(step.slots, parts, strict=False):
        own = _numbers(part, slot, step) if isinstance(part, Blocks) and not step.in_blocks else slot.own(part)
        slot.load(own, step.mixed)


def _numbers(blocks: Blocks, slot: Slot, step: _Step) -> Tensor:
    """Dequantizes this rank's part of a tensor in blocks, and as little of the rest as possible."""
    from llmserve.runtime.models.gguf_tensors import dequantize

    whole = slot.whole_blocks(blocks.format)
    part = slot.own(blocks) if whole else blocks
    assert isinstance(part, Blocks)
    tensor = GgufTensor("", step.name, part.shape, part.format.number, 0)
    values = dequantize(part.data.flatten(), tensor, step.dtype)
    return values if whole else values[slot.part]


def _plan(model: CausalLM, source: Source) -> tuple[list[_Step], list[str]]:
    """The steps that load this rank's part of the model, and the differences between the checkpoint and the whole
    model, a line each.

    With a SharedSource every rank has a step for every tensor, otherwise only for its own.
    """
    own = dict(model.slots())
    slots = own if model.num_layers == model.config.num_layers else _slots_of_all_stages(model) | own
    steps, differences, missing = [], [], dict.fromkeys(slots)
    formats: dict[int, dict[int, int]] = defaultdict(dict)  # of the tensors that enter each weight
    on_cpu = all(slot.weight.device.type == "cpu" for slot in own.values())
    for name, info in source.tensors.items():
        own_name = model_name(name, model.config)
        if own_name is None:
            continue
        parts = [own_name] if own_name in slots else split_name(own_name, model.config)
        names = [part for part in parts if part in slots]
        if not names:
            differences.append(f"{name}: the model has no such tensor")
            continue
        targets = [slots[known] for known in names]
        expected = targets[0].shape
        if len(targets) > 1:
            expected = (sum(slot.shape[0] for slot in targets), *expected[1:])
        shape = info.shape if own_name in slots else _as_matrix(info.shape)
        if shape != expected:
            differences.append(f"{name}: shape {list(info.shape)}, the model has {list(expected)}")
        elif info.nbytes == 0:
            differences.append(f"{name}: dtype {info.dtype} is not supported")
        for known in names:
            missing.pop(known, None)
        if names[0] in own or isinstance(source, SharedSource):
            mine = targets if names[0] in own else []
            steps.append(_Step(name, info, targets[0].weight.dtype, formats[id(targets[0].weight)], mine))
        for slot in targets:
            takes = on_cpu and info.blocks and slot.takes_blocks(BLOCK_FORMATS[info.blocks])
            formats[id(slot.weight)][slot.first_row] = info.blocks if takes else 0
    differences.extend(f"{name}: missing" for name in missing)
    return steps, differences


def _slots_of_all_stages(model: CausalLM) -> dict[str, Slot]:
    """Names, shapes and dtypes of the whole model, of which `model` is a stage. Nothing can be loaded into them."""
    return dict(build_model(model.config, model.dtype, torch.device("meta"), 1).slots())


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor of all experts with their matrices one below the other; any other shape as it is."""
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape


def _summary(checkpoint: Checkpoint, differences: list[str]) -> str:
    more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
    return f"{checkpoint.path} does not fit the model: {'; '.join(differences[:5])}{more}"


# ---- configs -------------------------------------------------------------------------------------------------------

_IMMATERIAL = {"architecture", "dtype", "max_position_embeddings", "multimodal", "raw"}
"""Fields of a ModelConfig that may differ between the versions of one model."""


def _config_differences(current: ModelConfig, new: ModelConfig) -> list[str]:
    if current.implementation == new.implementation == "transformers":
        from llmserve.runtime.models.transformers_backend import config_differences

        return config_differences(current, new)
    old_fields, new_fields = msgspec.to_builtins(current), msgspec.to_builtins(new)
    return [
        f"config: {name} is {_short(new_fields[name])}, the model has {_short(old_fields[name])}"
        for name in old_fields
        if name not in _IMMATERIAL and not _same(old_fields[name], new_fields[name])
    ]


def _same(a: Any, b: Any) -> bool:
    """Equality up to rounding: GGUF stores numbers in float32."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
