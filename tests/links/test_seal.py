"""What is sealed for a node opens there, for what it was sealed for, and nowhere else."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_distill.links.errors import LinkError
from flwr_distill.links.records import MAX_PARCEL, VIRTUAL_DATA, Peered
from flwr_distill.links.seal import seal, sealed_size, unseal

ALICE, BOB, EVE = (X25519PrivateKey.generate() for _ in range(3))
RUN = 7
ENDS = [b"\x80", b"\x80\0", b"\0\0", b"\x80\0\x80"]
"""Which look like padding."""


def public(key):
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def waybill(peer, **changes):
    fields = {"sender": "1", "receiver": "2", "purpose": "models", "token": "0" * 32, **changes}
    return Peered(**fields, peer_key=public(peer))


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=2000))
def test_what_is_sealed_opens_again_and_shows_nothing_of_itself(payload):
    sealed = seal(payload, waybill(BOB), RUN, ALICE)
    assert unseal(sealed, waybill(ALICE), RUN, BOB) == payload
    assert len(sealed) == sealed_size(len(payload), "models") == len(payload) + 28
    if len(payload) >= 8:
        assert payload not in sealed


SIZES = [1, 2, 3, *(multiple << power for power in range(40) for multiple in (4, 5, 6, 7))]


@settings(deadline=None, max_examples=100)
@given(
    st.one_of(
        st.binary(max_size=2000),
        st.builds(lambda head, end: head + end, st.binary(max_size=20), st.sampled_from(ENDS)),
    )
)
def test_virtual_data_arrive_as_they_were_and_show_of_their_size_one_of_few(payload):
    virtual = waybill(BOB, purpose=VIRTUAL_DATA)
    sealed = seal(payload, virtual, RUN, ALICE)
    opened = unseal(sealed, waybill(ALICE, purpose=VIRTUAL_DATA), RUN, BOB)
    assert opened == payload
    size = next(size for size in SIZES if size > len(payload))
    assert len(sealed) == sealed_size(len(payload), VIRTUAL_DATA) == size + 28


@settings(deadline=None)
@given(st.integers(min_value=8, max_value=MAX_PARCEL))
def test_padding_takes_a_quarter_of_the_size_at_most(size):
    padded = sealed_size(size, VIRTUAL_DATA) - 28
    assert padded in SIZES
    assert size < padded <= 1.25 * (size + 1)
    assert sealed_size(size + 1, VIRTUAL_DATA) - 28 >= padded


@pytest.mark.parametrize(
    "content",
    [b"", bytes(8), b"payload", b"payload\x80\0\1", b"payload\x80\0\0\0", b"\x80\0"],
)
def test_what_is_padded_in_another_way_is_refused(content, monkeypatch):
    """It could say something that nobody sees."""
    virtual = waybill(BOB, purpose=VIRTUAL_DATA)
    with monkeypatch.context() as patch:
        patch.setattr("flwr_distill.links.seal._padded", lambda payload, purpose: content)
        sealed = seal(b"", virtual, RUN, ALICE)
    with pytest.raises(LinkError, match="padding is invalid"):
        unseal(sealed, waybill(ALICE, purpose=VIRTUAL_DATA), RUN, BOB)


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=1, max_size=200), st.integers(min_value=0))
def test_any_changed_bit_is_noticed(payload, which):
    sealed = bytearray(seal(payload, waybill(BOB), RUN, ALICE))
    which %= 8 * len(sealed)
    sealed[which // 8] ^= 1 << which % 8
    with pytest.raises(LinkError, match="does not open"):
        unseal(bytes(sealed), waybill(ALICE), RUN, BOB)


@pytest.mark.parametrize(
    ("changes", "run", "sender", "receiver"),
    [
        ({}, RUN + 1, ALICE, BOB),
        ({"purpose": "virtual-data"}, RUN, ALICE, BOB),
        ({"token": "1" * 32}, RUN, ALICE, BOB),
        ({"sender": "3"}, RUN, ALICE, BOB),
        ({"receiver": "3"}, RUN, ALICE, BOB),
        ({"sender": "2", "receiver": "1"}, RUN, ALICE, BOB),
        ({}, RUN, EVE, BOB),
        ({}, RUN, ALICE, EVE),
    ],
    ids=["run", "purpose", "token", "sender", "receiver", "direction", "from eve", "to eve"],
)
def test_a_parcel_opens_nowhere_but_where_it_belongs(changes, run, sender, receiver):
    sealed = seal(b"weights", waybill(BOB), RUN, ALICE)
    with pytest.raises(LinkError, match="does not open"):
        unseal(sealed, waybill(sender, **changes), run, receiver)


@pytest.mark.parametrize("sealed", [b"", b"short", bytes(12), bytes(28)])
def test_what_is_no_sealed_parcel_does_not_open(sealed):
    with pytest.raises(LinkError, match="does not open"):
        unseal(sealed, waybill(ALICE), RUN, BOB)


def test_a_public_key_of_low_order_is_refused():
    weak = waybill(BOB).model_copy(update={"peer_key": bytes(32)})
    with pytest.raises(LinkError, match="unusable"):
        seal(b"weights", weak, RUN, ALICE)


def test_one_payload_sealed_twice_looks_different():
    assert seal(b"weights", waybill(BOB), RUN, ALICE) != seal(b"weights", waybill(BOB), RUN, ALICE)
