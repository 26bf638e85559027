"""build_app: the HTTP application of one instance, made from its dependencies."""

import importlib.metadata

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from llmserve.runtime.config import Secrets, ServerArgs
from llmserve.runtime.fanout import Replicas
from llmserve.runtime.models.hub import Checkpoint
from llmserve.runtime.models.sampling_defaults import SamplingDefaults
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.server import (
    admin,
    chat_answer,
    embeddings,
    errors,
    models,
    native,
    openai_chat,
    openai_completions,
    openapi,
    status,
)
from llmserve.runtime.server.auth import KeyPolicy
from llmserve.runtime.server.context import Context
from llmserve.runtime.server.frontdoor import Frontdoor
from llmserve.runtime.tokenizer_manager import TokenizerManager

DOCUMENTED = (
    openai_completions.CompletionRequest,
    openai_completions.Completion,
    openai_chat.ChatRequest,
    chat_answer.ChatCompletion,
    embeddings.EmbeddingRequest,
    embeddings.EmbeddingList,
    models.Model,
    models.ModelList,
    native.GenerateRequest,
    native.Generated,
    native.TokenizeRequest,
    native.Tokens,
    native.DetokenizeRequest,
    native.Text,
    status.Health,
    status.ServerInfo,
    admin.FlushCacheBody,
    admin.AbortBody,
    admin.UpdateWeightsBody,
    admin.PauseBody,
    admin.ContinueBody,
    errors.ErrorAnswer,
)


def build_app(
    tokenizer_manager: TokenizerManager,
    args: ServerArgs,
    options: dict[str, object],
    secrets: Secrets,
    checkpoint: Checkpoint,
    sampling_defaults: SamplingDefaults,
    rpc: Replicas,
) -> FastAPI:
    """The application: OpenAI's and native routes over the TokenizerManager, and the operators' over `rpc`.

    `options` are the values in effect of `args`, for /server_info. There is no interactive documentation, because its
    pages would load scripts from other sites.
    """
    context = Context(
        manager=tokenizer_manager,
        args=args,
        options=options,
        checkpoint=checkpoint,
        sampling_defaults=sampling_defaults,
    )
    app = FastAPI(
        title="llmserve",
        version=importlib.metadata.version("llmserve"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: errors.on_http_exception, RequestError: errors.on_request_error},
    )
    for module in (openai_completions, openai_chat, embeddings, models, native, status):
        module.add_routes(app, context)
    admin.add_routes(app, rpc)
    app.add_middleware(Frontdoor, keys=KeyPolicy(args, secrets))
    openapi.describe(app, DOCUMENTED)
    return app
