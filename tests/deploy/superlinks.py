"""Runs, nodes and messages in a SuperLink's state."""

import secrets
import time
from types import SimpleNamespace

from flwr.app import Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.supercore.constant import NOOP_FEDERATION
from flwr.superlink.federation import NoOpFederationManager

from flwr_distill.flower.line_1_32.fleet.linkstate import CachingLinkState
from flwr_distill.flower.line_1_32.fleet.store import OneConnectionStore


def opened(database, state=CachingLinkState, store=OneConnectionStore):
    objects = store(str(database))
    objects.initialize()
    opened = state(str(database), NoOpFederationManager(), objects)
    opened.initialize()
    return opened, objects


def factories(state, store):
    """As Flower's servicers take them."""
    return SimpleNamespace(state=lambda: state), SimpleNamespace(store=lambda: store)


def new_node(state, key=None):
    node = state.create_node(NOOP_FLWR_AID, "", key or secrets.token_bytes(16), 30.0)
    state.activate_node(node, 30.0)
    return node


def new_run(state):
    return state.create_run(*(None, None, None, {}, NOOP_FEDERATION, None, None, "flwr-serverapp"))


def message_to(node, run, content=None):
    metadata = Metadata(
        *(run, secrets.token_hex(16), SUPERLINK_NODE_ID, node, "", "", time.time(), 60.0, "train")
    )
    message = make_message(metadata, content or RecordDict())
    message.metadata.__dict__["_message_id"] = message.object_id
    return message
