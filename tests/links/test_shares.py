"""Shares of a secret open it, in any choice that is large enough, and are those of Flower's."""

from flwr.common.secure_aggregation.crypto import shamir as flowers
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.links.shares import combine_shares, create_shares


@given(secret=st.binary(max_size=70), data=st.data())
def test_as_many_shares_as_the_threshold_open_a_secret(secret, data):
    count = data.draw(st.integers(2, 6))
    threshold = data.draw(st.integers(2, count))
    shares = create_shares(secret, threshold, count)
    chosen = data.draw(st.permutations(shares))[:threshold]
    assert combine_shares(chosen) == secret
    assert flowers.combine_shares(list(chosen)) == secret


def test_shares_that_flower_wrote_are_read():
    secret = bytes(range(32))
    assert combine_shares(flowers.create_shares(secret, 3, 5)[2:]) == secret


def test_shares_of_different_secrets_open_neither():
    secrets = bytes(32), bytes([255] * 32)
    first, second = (create_shares(secret, 2, 3) for secret in secrets)
    try:
        opened = combine_shares([first[0], second[1]])
    except ValueError:
        return
    assert opened not in secrets


def test_too_few_shares_do_not_open_a_secret():
    for _ in range(20):
        try:
            opened = combine_shares(create_shares(b"a key of a node", 3, 4)[:2])
        except ValueError:
            continue
        assert opened != b"a key of a node"


def test_a_secret_is_not_in_its_shares():
    secret = bytes(range(64))
    for share in create_shares(secret, 2, 3):
        assert not any(secret[i : i + 4] in share for i in range(61))
