from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Part(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: Header
    chunk: bytes
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("run_id", "sender", "receiver", "purpose", "token", "permit", "size", "sha256", "largest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: int
    sender: str
    receiver: str
    purpose: str
    token: str
    permit: str
    size: int
    sha256: str
    largest: int
    def __init__(self, run_id: _Optional[int] = ..., sender: _Optional[str] = ..., receiver: _Optional[str] = ..., purpose: _Optional[str] = ..., token: _Optional[str] = ..., permit: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[str] = ..., largest: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
