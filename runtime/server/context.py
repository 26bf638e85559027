"""Context: the dependencies of the routes, passed to them by build_app. There is no module-level state."""

import dataclasses
import time

from llmserve.runtime.config import ServerArgs
from llmserve.runtime.models.hub import Checkpoint
from llmserve.runtime.models.sampling_defaults import SamplingDefaults
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.tokenizer import Tokenizer
from llmserve.runtime.tokenizer_manager import TokenizerManager


@dataclasses.dataclass(frozen=True)
class Context:
    manager: TokenizerManager
    args: ServerArgs
    options: dict[str, object]
    checkpoint: Checkpoint
    sampling_defaults: SamplingDefaults
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    """Unix seconds: the `created` of the model in /v1/models."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.manager.tokenizer

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.args.served_model_names or (self.checkpoint.name,)

    def check_model(self, name: str | None) -> str:
        """The model name for the answer, by default the first served one. Raises RequestError 404 for a name not
        served.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            raise RequestError(
                404,
                f"the model {name!r} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            )
        return name
