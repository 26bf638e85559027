"""SamplingDefaults: the sampling parameters that a checkpoint recommends, in its generation_config.json."""

from typing import Annotated, Any, Literal

import msgspec

from llmserve.runtime.config import ConfigError
from llmserve.runtime.models.configs import Json


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The values for what a request leaves out; without a recommendation those of OpenAI's API. `top_k` 0 means off."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0


def sampling_defaults(whose: Literal["model", "openai"], generation: Json) -> SamplingDefaults:
    """What a generation_config.json recommends, or OpenAI's. Raises ConfigError for a value that no request could have.

    `do_sample` does not count: a client that wants greedy decoding asks for temperature 0.
    """
    if whose == "openai":
        return SamplingDefaults()
    values: dict[str, Any] = {name: value for name, value in generation.items() if value is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    try:
        return msgspec.convert(values, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the sampling defaults in generation_config.json are not usable: {error}; "
            "--sampling-defaults openai does without them"
        ) from error
