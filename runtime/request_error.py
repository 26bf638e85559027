"""RequestError: how every part of the front refuses a request or reports that it failed."""


class RequestError(Exception):
    """A request that is refused or has failed. `status` is the HTTP status; the other fields are those of OpenAI's
    error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        type: str | None = None,
        code: str | None = None,
    ) -> None:
        """`param` names the parameter at fault; `type` None is chosen by the status."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")
        self.code = code
