"""The rules that every message keeps, and that any of them survives the wire."""

from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from llmserve.runtime import messages
from llmserve.runtime.messages import (
    AnyMessage,
    ControlReqInput,
    ControlReqOutput,
    ControlRequest,
    Message,
    RpcEnvelope,
)
from llmserve.runtime.wire import decode, encode

STRUCTS = [
    value
    for value in vars(messages).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == messages.__name__
]
SENT = get_args(AnyMessage)


def test_every_control_request_has_its_answer_and_says_so() -> None:
    inputs = {member.__name__.removesuffix("ReqInput") for member in get_args(ControlReqInput)}
    outputs = {member.__name__.removesuffix("ReqOutput") for member in get_args(ControlReqOutput)}
    assert inputs == outputs
    for member in get_args(ControlReqInput):
        [base] = member.__orig_bases__
        assert get_args(base)[0].__forward_arg__ == member.__name__.removesuffix("Input") + "Output"


def test_the_seed_s_messages_are_there_by_name() -> None:
    named = {
        *("GenerateReqInput", "EmbeddingReqInput", "TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput"),
        *("FlushCacheReqInput", "AbortReqInput", "UpdateWeightReqInput"),
        *("BatchTokenIDOutput", "BatchStrOutput", "BatchEmbeddingOutput"),
    }
    assert named <= {member.__name__ for member in SENT}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_struct_is_frozen_and_takes_keywords_only(struct: type[msgspec.Struct]) -> None:
    assert struct.__struct_config__.frozen
    if struct.__struct_fields__:
        with pytest.raises(TypeError, match="positional"):
            struct(*[None] * len(struct.__struct_fields__))


def test_every_message_can_be_sent_and_is_known_by_its_name() -> None:
    defined = {struct for struct in STRUCTS if issubclass(struct, Message)} - {Message, ControlRequest}
    assert set(SENT) == defined
    for member in SENT:
        assert member.__struct_config__.tag == member.__name__
        assert member.__struct_config__.forbid_unknown_fields


def test_the_envelope_can_be_read_whatever_else_another_version_puts_in() -> None:
    assert not RpcEnvelope.__struct_config__.forbid_unknown_fields
    assert RpcEnvelope.__struct_fields__ == ("protocol", "call_id", "timeout_s", "body")


def instance_of(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return st.builds(struct, **{field.name: st.from_type(field.type) for field in msgspec.structs.fields(struct)})


for each in STRUCTS:
    st.register_type_strategy(each, instance_of(each))


@pytest.mark.parametrize("struct", SENT, ids=lambda struct: struct.__name__)
def test_any_message_survives_the_wire(struct: type[Message]) -> None:
    @settings(max_examples=15)
    @given(instance_of(struct))
    def survives(message: Message) -> None:
        assert repr(decode(encode(message))) == repr(message)  # equal, and NaN to NaN too

    survives()


@given(instance_of(RpcEnvelope))
def test_any_envelope_survives_the_wire(envelope: RpcEnvelope) -> None:
    assert repr(decode(encode(envelope), RpcEnvelope)) == repr(envelope)
