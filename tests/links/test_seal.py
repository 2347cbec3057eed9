"""What is sealed for a node opens there, for what it was sealed for, and nowhere else."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from links.errors import LinkError
from links.records import Peered
from links.seal import seal, unseal

ALICE, BOB, EVE = (X25519PrivateKey.generate() for _ in range(3))
RUN = 7


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
    assert len(sealed) == len(payload) + 28
    if len(payload) >= 8:
        assert payload not in sealed


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
